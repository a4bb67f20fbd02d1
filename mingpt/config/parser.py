"""Reads a Config from yaml files and the command line, or raises one message that lists every mistake."""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from mingpt.config.conflicts import find_conflicts, refuse
from mingpt.config.schema import KEYS, SECTIONS, Config, TrainerConfig, by_section, config_to_dict
from mingpt.config.yaml_format import dump_config
from mingpt.errors import UserError

DEFAULT_CONFIG = Path(__file__).parents[2] / "gpt2_train_cfg.yaml"
COMMAND_LINE = "the command line"
HELP = """\
usage: main.py [--config FILE] [--section.key VALUE ...]

Trains a GPT on characters or tokens, in one process or under a launcher like torchrun.

  --config FILE        yaml with the keys to change; a later file has precedence
                       (default: gpt2_train_cfg.yaml beside main.py)
  --section.key VALUE  set a key, such as --trainer.max_steps 100; has
                       precedence over files
  --print_config       print the configuration as yaml and exit
  --help               print this and exit

"""


class _Loader(yaml.BaseLoader):
    """Refuses a key that a file has twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            raise yaml.YAMLError(f"a key is there twice: {node.start_mark}")
        return values


Values = dict[str, tuple[Any, str]]  # for each key, such as data.path: the value, and where it was found, for messages


def read_config(argv: Sequence[str] = ()) -> Config:
    """Reads the yaml files and applies the options of the command line; other keys keep their defaults.

    Args:
        argv: the command line without the program's name

    Raises:
        UserError: lists every mistake, with the key, the file or option, the value found and the values allowed.
    """
    if "--help" in argv or "-h" in argv:
        print(HELP + dump_config(config_to_dict(Config())), end="")
        sys.exit(0)
    files, options = _read_command_line(argv)
    given: Values = {}
    for file in files or [str(DEFAULT_CONFIG)]:
        given |= _read_yaml(file)
    given |= options
    mistakes = [_unknown_name(name, place) for name, (_, place) in given.items() if name not in KEYS]
    values = {name: value for name, (value, _) in given.items() if name in KEYS}
    try:
        # Outside strict mode, pydantic converts text to numbers and booleans.
        config = TypeAdapter(Config).validate_python({**by_section(values), "given": frozenset(options)}, strict=False)
    except ValidationError as invalid:
        # A key that allows a number or a word has an error for each.
        allowed: dict[str, list[str]] = {}
        for error in invalid.errors(include_url=False):
            allowed.setdefault("{}.{}".format(*error["loc"]), []).append(error["msg"])
        for name, messages in allowed.items():
            value, place = given[name]
            mistakes.append(f"{name} (in {place}): found {value!r}: {'; or: '.join(messages)}")
    else:
        for message in find_conflicts(config):
            places = [place for name, (_, place) in given.items() if name in message]
            mistakes.append(f"{message} (in {COMMAND_LINE if COMMAND_LINE in places else places[-1]})")
    refuse(mistakes)
    trainer = config.trainer
    is_default = trainer.max_steps == TrainerConfig.max_steps and "trainer.max_steps" not in options
    if trainer.max_epochs and is_default:
        config = replace(config, trainer=replace(trainer, max_steps=None))
    if "--print_config" in argv:
        print(dump_config(config_to_dict(config)), end="")
        sys.exit(0)
    return config


def _read_yaml(file: str) -> Values:
    """Returns the value of each key. Numbers and booleans stay text until pydantic converts them.

    yaml 1.1 would read 010 as 8, 12:30 as 750, and 1e-3 as text.
    """
    try:
        content = yaml.load(Path(file).read_bytes(), _Loader) or {}
        if not isinstance(content, dict):
            raise yaml.YAMLError(f"found {content!r}, must be the sections {', '.join(SECTIONS)}")
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--config: {file} can't be read: {' '.join(str(error).split())}") from error
    values: Values = {}
    for name, value in content.items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": (_null(each), file) for key, each in value.items()}
        elif value or name not in SECTIONS:  # a section may be empty
            values[name] = _null(value), file
    folder = Path(file).parent
    if Path(file).name == "config.yaml" and (folder / "metrics.jsonl").exists():
        values["trainer.run_dir"] = str(folder), file  # the run folder may have been moved or copied
    return values


def _null(value: Any) -> Any:
    return None if value in ("null", "~", "") else value


def _read_command_line(argv: Sequence[str]) -> tuple[list[str], Values]:
    """Returns the files of --config, and the values of other options: `--name value` or `--name=value`."""
    files: list[str] = []
    values: Values = {}
    words = [word for word in argv if word != "--print_config"]
    while words:
        option, equals, text = words.pop(0).partition("=")
        if not option.startswith("--"):
            raise UserError(
                f"{option!r} (in {COMMAND_LINE}) does not belong to an option: write --section.key VALUE, and quote "
                "values with blanks and patterns of files; --help lists all keys"
            )
        if not equals and words and not words[0].startswith("--"):
            text = words.pop(0)
        name = option.removeprefix("--")
        if name == "config":
            files.append(text)
        elif name not in ("local_rank", "local-rank"):  # older launchers pass this and also set LOCAL_RANK
            value: str | list[str] | None = None if text == "null" else text
            if text.startswith("[") and name in KEYS and "tuple[" in str(KEYS[name].annotation):
                value = [item.strip() for item in text.strip("[]").split(",")]
            values[name] = value, COMMAND_LINE
    return files, values


def _unknown_name(name: str, place: str) -> str:
    """Returns the message for a name that is not a key, with the nearest key."""
    _, _, key = name.rpartition(".")
    nearest = [known for known in KEYS if known.endswith(f".{key}")]
    nearest += difflib.get_close_matches(name, KEYS, n=1, cutoff=0.5)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    return f"{name} (in {place}) is not known{hint}; --help lists all keys"


def default_snapshot_path() -> str:
    """Returns the folder of the run in gpt2_train_cfg.yaml."""
    return read_config().trainer.run_dir
