"""Reads a Config from the yaml file and the command line, or raises one message that lists every mistake."""

import argparse
import difflib
import json
import reprlib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from mingpt.config.conflicts import find_conflicts, refuse
from mingpt.config.schema import KEYS, SECTIONS, Config, config_to_dict
from mingpt.config.yaml_format import dump_config, load_yaml
from mingpt.errors import UserError

DEFAULT_CONFIG = Path(__file__).parents[2] / "gpt2_train_cfg.yaml"
COMMAND_LINE = "the command line"
Sections = dict[str, dict[str, Any]]


def read_config(argv: Sequence[str] = ()) -> Config:
    """Reads the yaml file and applies the options of the command line; other keys keep their defaults.

    Args:
        argv: the command line without the program's name

    Raises:
        UserError: lists every mistake, with the key, the file or option, the value found and the values allowed.
    """
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        raise UserError(f"command line: {_unknown_option(unknown[0])}")
    file = DEFAULT_CONFIG if args.config is None else Path(args.config)
    values = _read_yaml(file) if args.config is not None or file.exists() else {}
    given = [name for name in KEYS if getattr(args, name) is not None]
    for name in given:
        section, key = name.split(".")
        values.setdefault(section, {})[key] = _parse_option(name, getattr(args, name))
    config = _validate(values, given, file)
    if args.print_config:
        print(dump_config(config_to_dict(config)), end="")
        sys.exit(0)
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Reports errors of argparse like all other mistakes."""
        raise UserError(f"command line: {message}; --help lists all")


def build_parser() -> argparse.ArgumentParser:
    """Returns a parser with one option per key, which keeps values as text and raises UserError."""
    parser = _Parser(
        description="Trains a character-level GPT, in one process or under torchrun or another launcher.",
        usage="%(prog)s [--config FILE] [--SECTION.KEY VALUE ...]",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38),
    )
    parser.add_argument("--config", metavar="FILE", help=f"yaml file (default: {DEFAULT_CONFIG.name} beside main.py)")
    parser.add_argument("--print_config", action="store_true", help="print the configuration as yaml and exit")
    # Older launchers pass this option, and the same number in LOCAL_RANK.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    groups = {name: parser.add_argument_group(name, section.__doc__) for name, section in SECTIONS.items()}
    for name, field in KEYS.items():
        default = json.dumps(field.default).replace('"', "")
        text = f"{field.description} (default: {default})"
        groups[name.split(".")[0]].add_argument(f"--{name}", metavar="X", help=text)
    return parser


def config_options(args: argparse.Namespace) -> list[str]:
    """Returns the options that `build_parser` parsed as a command line for `read_config`."""
    given = {key: getattr(args, key) for key in ("config", *KEYS)}
    options = [word for key, text in given.items() if text is not None for word in option_words(key, text)]
    if args.print_config:
        options.append("--print_config")
    return options


def option_words(name: str, value: Any) -> list[str]:
    """Returns an option and its value as words of a command line: text as it is, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    if text.startswith("-"):  # argparse would take it for another option
        return [f"--{name}={text}"]
    return [f"--{name}", text]


def default_snapshot_path() -> str:
    """Returns the folder of the snapshots of the run in gpt2_train_cfg.yaml."""
    cfg = read_config().trainer
    return cfg.snapshot_path or cfg.run_dir


def _read_yaml(file: Path) -> Sections:
    try:
        sections = load_yaml(file.read_bytes()) or {}
    except OSError as error:
        raise UserError(f"--config: {file} can't be read: {error.strerror}; name a yaml file") from error
    except yaml.YAMLError as error:
        text = " ".join(str(error).replace('"<byte string>", ', "").split())
        raise UserError(f"{file} is not valid yaml: {text}") from error
    if not isinstance(sections, dict):
        raise UserError(f"{file} holds {reprlib.repr(sections)}; it must hold the sections {', '.join(SECTIONS)}")
    values = {str(section): keys or {} for section, keys in sections.items()}
    for section in SECTIONS:
        keys = values.get(section, {})
        if not isinstance(keys, dict):
            raise UserError(f"{section} (in {file}): found {reprlib.repr(keys)}, must hold keys with values")
    return values


def _parse_option(name: str, text: str) -> Any:
    """Parses the value of an option like yaml, but for keys that hold text, only `null` has a meaning."""
    annotation = KEYS[name].annotation
    if annotation is str:
        return text
    if annotation == str | None:
        return None if text == "null" else text
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {near[0]}" if near else ""


def _unknown_option(word: str) -> str:
    """Returns the message for an unknown word of the command line, with advice."""
    hint = f"{_nearest(word.partition('=')[0], [f'--{name}' for name in KEYS])}; --help lists all"
    if not word.startswith("-") and "." in word and Path(word).exists():
        hint = "; an option has one value: if the shell replaced a pattern, quote it, like --data.path 'books/*.txt'"
    return f"{word} is not known{hint}"


def _validate(values: Sections, given: Collection[str], file: Path) -> Config:
    """Returns the configuration.

    Args:
        values: values by section and key
        given: keys from the command line
        file: the file with the other keys
    """
    mistakes = []
    try:
        # From JSON, pydantic accepts a list as a tuple and an integer as a float, but not a string as a number.
        config = TypeAdapter(Config).validate_json(json.dumps(values))
    except ValidationError as invalid:
        ranges: dict[str, list[str]] = {}  # a key that allows a number or a word has an error for each
        for error in invalid.errors(include_url=False):
            name = ".".join(map(str, error["loc"][:2]))
            if error["type"] == "unexpected_keyword_argument":
                mistakes.append(_unknown_name(name, file))
            else:
                ranges.setdefault(name, []).append(_allowed_value(error))
        for name, allowed in ranges.items():
            mistakes.append(_wrong_value(name, values, COMMAND_LINE if name in given else file, allowed))
        raise UserError("\n  ".join(mistakes)) from invalid
    for message in find_conflicts(config):
        # If the command line sets one of the keys, the mistake is probably there.
        place = COMMAND_LINE if any(key in message for key in given) else file
        mistakes.append(f"{message} (in {place})")
    refuse(mistakes)
    return config


def _unknown_name(name: str, file: Path) -> str:
    if "." in name:
        return f"{name} (in {file}): unknown key{_nearest(name, KEYS)}; --help lists all"
    return f"{name} (in {file}): unknown section{_nearest(name, SECTIONS)}; there are {', '.join(SECTIONS)}"


def _allowed_value(error: ErrorDetails) -> str:
    if "betas" in error["loc"] and error["type"] in ("missing", "too_long", "tuple_type", "float_type"):
        return "a list of two numbers"
    if error["type"] == "string_too_short":
        return "at least one character"
    return error["msg"].removeprefix("Input should be ").replace("a valid boolean", "true or false")


def _wrong_value(name: str, values: Sections, place: Path | str, allowed: list[str]) -> str:
    section, key = name.split(".")
    value = values[section][key]
    null = "null or " if type(None) in get_args(KEYS[name].annotation) else ""
    ranges = " or ".join(dict.fromkeys(allowed))
    return f"{name} (in {place}): found {reprlib.repr(value)}, must be {null}{ranges}"
