"""Yaml file and command line -> Config, or one message that lists every mistake."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from mingpt.config import KEYS, SECTIONS, Config, config_to_dict
from mingpt.utils.errors import UserError

DEFAULT_CONFIG = Path(__file__).parent.parent / "gpt2_train_cfg.yaml"
HINTS = {
    "dp": "; DataParallel is one process that copies the model to all its GPUs in every step, and slow: write ddp, and "
    "start a process for each GPU with torchrun"
}
Sections = dict[str, dict[str, Any]]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads 3e-4 as a number (yaml 1.1 takes it for a string)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_config(argv: Sequence[str] = ()) -> Config:
    """Reads the yaml file and applies the options of the command line; other keys keep their defaults.

    Args:
        argv: the command line without the program's name

    Raises:
        UserError: lists every mistake with key, file or option, value found and values allowed.
    """
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        raise UserError(
            f"command line: {unknown[0]} is not known{_nearest(unknown[0].lstrip('-'), KEYS)}; --help lists all"
        )
    file = DEFAULT_CONFIG if args.config is None else Path(args.config)
    values = _read_yaml(file) if args.config is not None or file.exists() else {}
    origins = dict.fromkeys((f"{section}.{key}" for section in values for key in values[section]), str(file))
    for name in KEYS:
        if (text := getattr(args, name)) is not None:
            section, key = name.split(".")
            is_verbatim = name == "trainer.sample_prompt" and text != "null"  # "ROMEO:" is a mapping in yaml
            values.setdefault(section, {})[key] = text if is_verbatim else _parse_value(text)
            origins[name] = "the command line"
    config = _validate(values, origins)
    if args.print_config:
        print(yaml.safe_dump(config_to_dict(config), sort_keys=False), end="")
        sys.exit(0)
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Reports argparse's errors like all others."""
        raise UserError(f"command line: {message}; --help lists all")


def build_parser() -> argparse.ArgumentParser:
    """A parser with one option per key, whose value stays text. It raises UserError."""
    parser = _Parser(
        description="Trains a character-level GPT, in one process or under torchrun or another launcher.",
        usage="%(prog)s [--config FILE] [--SECTION.KEY VALUE ...]",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38),
    )
    parser.add_argument("--config", metavar="FILE", help=f"yaml file (default: {DEFAULT_CONFIG.name} beside main.py)")
    parser.add_argument("--print_config", action="store_true", help="print the configuration as yaml and exit")
    # Older launchers pass it; LOCAL_RANK has the same number.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    groups = {name: parser.add_argument_group(name, section.__doc__) for name, section in SECTIONS.items()}
    for name, field in KEYS.items():
        default = json.dumps(field.default).replace('"', "")
        text = f"{field.description} (default: {default})"
        groups[name.split(".")[0]].add_argument(f"--{name}", metavar="X", help=text.replace("%", "%%"))
    return parser


def config_options(args: argparse.Namespace) -> list[str]:
    """The options that `build_parser` parsed, as a command line for `read_config`."""
    given = {key: getattr(args, key) for key in ("config", *KEYS)}
    options = [word for key, value in given.items() if value is not None for word in (f"--{key}", value)]
    return options + ["--print_config"] * args.print_config


def default_snapshot_path() -> str:
    """Folder of the snapshots of the run that gpt2_train_cfg.yaml describes."""
    cfg = read_config().trainer
    return cfg.snapshot_path or cfg.run_dir


def _read_yaml(file: Path) -> Sections:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader) or {}
        json.dumps(content, default=str)
    except OSError as error:
        raise UserError(f"--config: {file} can't be read: {error.strerror}; name a yaml file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise UserError(f"{file} is not valid yaml: {text}") from error
    except ValueError:
        raise UserError(
            f"{file} is not valid yaml here: an alias contains itself, such as n_layer: *model in model"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds {content!r}; it must hold the sections {', '.join(SECTIONS)}")
    values = {section: keys if keys is not None else {} for section, keys in content.items()}
    if mistakes := list(_unknown_names(values)):
        raise UserError("\n  ".join([f"{file}:", *mistakes]))
    return values


def _unknown_names(values: dict[Any, Any]) -> Iterator[str]:
    for section, keys in values.items():
        if section not in SECTIONS:
            nearest = _nearest(str(section), SECTIONS)
            yield f"{section}: unknown section{nearest}; there are {', '.join(SECTIONS)}"
        elif not isinstance(keys, dict):
            yield f"{section}: found {keys!r}, must hold keys with values"
        else:
            names = (f"{section}.{key}" for key in keys)
            yield from (f"{n}: unknown key{_nearest(n, KEYS)}; --help lists all" for n in names if n not in KEYS)


def _parse_value(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {near[0]}" if near else ""


def _validate(values: Sections, origins: dict[str, str]) -> Config:
    try:
        # In JSON a list may become a tuple and an integer a float, while no string becomes a number.
        return TypeAdapter(Config).validate_json(json.dumps(values, default=str))
    except ValidationError as invalid:
        mistakes: dict[str, str] = {}
        for error in invalid.errors(include_url=False):
            if error["type"] == "value_error":  # from a check between keys, whose message begins with a key
                message = error["msg"].removeprefix("Value error, ")
                name = message.split()[0]
                mistakes[message] = f" (in {origins[name]})" if name in origins else ""
                continue
            section, key, *_ = (str(part) for part in error["loc"])
            name, allowed = f"{section}.{key}", error["msg"].replace("Input should be ", "")
            if key == "betas" and error["type"] in ("missing", "too_long", "tuple_type", "float_type"):
                allowed = "a list of two numbers"
            if name in mistakes:
                mistakes[name] += f" or {allowed}" * (allowed not in mistakes[name])
            else:
                value = values[section][key]
                null = "null or " if type(None) in get_args(KEYS[name].annotation) else ""
                hint = HINTS.get(str(value), "")
                mistakes[name] = f" (in {origins[name]}): found {value!r}, must be {null}{allowed}{hint}"
        raise UserError("\n  ".join(name + text for name, text in mistakes.items())) from invalid
