"""Reads a Config from yaml files and the command line, or raises one message that lists every mistake."""

import difflib
import reprlib
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from mingpt.config.conflicts import find_conflicts, refuse
from mingpt.config.schema import KEYS, SECTIONS, Config, TrainerConfig, by_section, config_to_dict
from mingpt.config.yaml_format import Values, dump_config, format_value, read_yaml
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
DASHES = "-+\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # which chats and editors write for --
TORCHRUN_OPTIONS = {"nproc_per_node", "nnodes", "node_rank", "standalone", "max_restarts", "rdzv_backend"}
TORCHRUN_OPTIONS |= {"rdzv_endpoint", "rdzv_id", "master_addr", "master_port"}
HINTS = {
    "dp": "; DataParallel is slow, because one process copies the model to all GPUs in every step: write ddp, and "
    "start a process for each GPU with torchrun",
    "zero3": "; ZeRO-3 is fsdp",
}
# Keys whose type is, or includes, a tuple, such as `tuple[int, int] | None`.
LIST_KEYS = [name for name, info in KEYS.items() if "tuple[" in str(info.annotation)]


def read_config(argv: Sequence[str] = ()) -> Config:
    """Reads the yaml files and applies the options of the command line; other keys keep their defaults.

    Args:
        argv: the command line without the program's name

    Raises:
        UserError: lists every mistake, with the key, the file or option, the value found and the values allowed.
    """
    if "--help" in argv or "-h" in argv:
        width = shutil.get_terminal_size().columns
        for line in (HELP + dump_config(config_to_dict(Config()))).splitlines():
            print(textwrap.fill(line, width, subsequent_indent="    # ", break_on_hyphens=False))
        sys.exit(0)
    files, given = _read_command_line(argv)
    on_command_line = frozenset(given)
    files = files or [str(DEFAULT_CONFIG)]
    for file in reversed(files):  # the file with the highest precedence first
        for name, found in _read_file(file).items():
            given.setdefault(name, found)
    mistakes = [_unknown_name(name, *found) for name, found in given.items() if name not in KEYS]
    values = {name: value for name, (value, _) in given.items() if name in KEYS}
    try:
        # Outside strict mode, pydantic converts text to numbers and booleans.
        config = TypeAdapter(Config).validate_python({**by_section(values), "given": on_command_line}, strict=False)
    except ValidationError as invalid:
        # A key that allows a number or a word has an error for each.
        for name, errors in groupby(invalid.errors(include_url=False), lambda error: "{}.{}".format(*error["loc"])):
            mistakes.append(_wrong_value(name, *given[name], errors))
    else:
        for message in find_conflicts(config):
            place = next(place for name, (_, place) in given.items() if name in message)
            mistakes.append(f"{message} (in {place})")
    refuse(mistakes)
    trainer = config.trainer
    is_default = trainer.max_steps == TrainerConfig.max_steps and "trainer.max_steps" not in on_command_line
    if trainer.max_epochs and is_default:
        config = replace(config, trainer=replace(trainer, max_steps=None))
    if "--print_config" in argv:
        print(dump_config(config_to_dict(config)), end="")
        sys.exit(0)
    return config


def _read_file(file: str) -> Values:
    """Reads a yaml file. The config.yaml of a run folder that was moved or copied names another folder."""
    values = read_yaml(file)
    folder = Path(file).parent
    if Path(file).name == "config.yaml" and (folder / "metrics.jsonl").exists():
        values["trainer.run_dir"] = str(folder if folder.name else folder.resolve()), file
    return values


def _read_command_line(argv: Sequence[str]) -> tuple[list[str], Values]:
    """Returns the files of --config, and the values of other options: `--name value` or `--name=value`."""
    files: list[str] = []
    values: Values = {}
    words = deque(word for word in argv if word != "--print_config")
    while words:
        option, equals, text = words.popleft().partition("=")
        if not option.startswith("--"):
            name = option.strip().lstrip(DASHES)
            advice = f"write --{name}, or quote a pattern of files" if name else "is there a blank after a backslash?"
            raise UserError(
                f"{option!r} (in {COMMAND_LINE}) does not belong to an option: {advice}; --help lists all keys"
            )
        if not equals and words and not words[0].startswith("--"):
            text = words.popleft()
        name = option.removeprefix("--")
        if name == "config":
            files.append(text)
        elif name not in ("local_rank", "local-rank"):  # older launchers pass this and also set LOCAL_RANK
            value: str | list | None = None if text == "null" else text
            if name in LIST_KEYS and text.startswith("["):
                value = [item.strip() for item in text.strip("[]").split(",")]
            values[name] = value, COMMAND_LINE
    return files, values


def _unknown_name(name: str, value: Any, place: str) -> str:
    """Returns the message for a name that is not a key, with the nearest key."""
    if name in SECTIONS:
        return f"{name} (in {place}): found {reprlib.repr(value)}, must contain keys"
    if name.replace("-", "_") in TORCHRUN_OPTIONS:
        return f"{name} (in {place}) is an option of torchrun: write it before main.py"
    _, _, key = name.rpartition(".")
    nearest = [known for known in KEYS if known.endswith(f".{key}")]
    nearest += difflib.get_close_matches(name, KEYS, n=1, cutoff=0.5)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    return f"{name} (in {place}) is not known{hint}; --help lists all keys"


def _wrong_value(name: str, value: Any, place: str, errors: Iterable[ErrorDetails]) -> str:
    allowed = ["null"] if type(None) in get_args(KEYS[name].annotation) else []
    for error in errors:
        text, _, _ = error["msg"].partition(", unable to ")
        allowed.append(text.removeprefix("Input should be ").removeprefix("String should have "))
    ranges = " or ".join(allowed).replace("a valid boolean", "true or false").replace("a valid string", "UTF-8 text")
    default = KEYS[name].default
    if isinstance(default, tuple):  # the errors may be about items, or about their number
        ranges = f"a list like {format_value(default)}: {ranges}"
    return f"{name} (in {place}): found {reprlib.repr(value)}, must be {ranges}{HINTS.get(str(value), '')}"


def default_snapshot_path() -> str:
    """Returns the folder of the run in gpt2_train_cfg.yaml."""
    return read_config().trainer.run_dir
