"""What does this run do? Yaml and command line -> Config -> process group -> Trainer."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import TypeAdapter, ValidationError
from torch.distributed.elastic.multiprocessing.errors import record

from char_dataset import DataConfig
from composition import check_sections
from distributed import DistributedConfig, connect
from errors import PeerError, UserError
from hardware import keep_freed_memory
from launchers import who_am_i
from memory import ran_out
from model import ModelConfig
from optimizer import OptimizerConfig
from screen import complain
from state import plain
from trainer import Trainer, TrainerConfig

ROOMS = Path(__file__).parent
YAML = ROOMS / "gpt2_train_cfg.yaml"
PLACES = (
    "trainer.run_dir",
    "trainer.snapshot_path",
    "data.path",
    "distributed.init_method",
)  # may differ between ranks


@dataclass(frozen=True)
class Config:
    """A run: one section for each room that is configured."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        check_sections(self)


SECTIONS: dict[str, Any] = {
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "trainer": TrainerConfig,
    "distributed": DistributedConfig,
}
HINTS = {
    "dp": "; DataParallel is one process that copies the model to all its GPUs in every step, and slow: write ddp, and "
    "start a process for each GPU with torchrun"
}
KEYS = {f"{section}.{f.name}": f for section, room in SECTIONS.items() for f in fields(room)}


class _Loader(yaml.SafeLoader):
    """Yaml in which a key counts once, and 3e-4 is a number."""

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
    """The configuration that the yaml file and the command line ask for; a key in neither has its default.

    Args:
        argv: the command line without the program's name

    Raises:
        UserError: names each mistake, where it stands, what was found and what is allowed.
    """
    known, unknown = option_parser().parse_known_args(argv)
    if unknown:
        nearest = _nearest(unknown[0].lstrip("-"), KEYS)
        raise UserError(f"command line: {unknown[0]} is not known{nearest}; --help lists all")

    file = YAML if known.config is None else Path(known.config)
    found = _read_yaml(file) if known.config is not None or file.exists() else {}
    origin = dict.fromkeys((f"{section}.{key}" for section in found for key in found[section]), str(file))
    for name in KEYS:
        if (text := getattr(known, name)) is not None:
            section, key = name.split(".")
            found.setdefault(section, {})[key] = _scalar(text)
            origin[name] = "the command line"
    config = _validate(found, origin)
    if known.print_config:
        print(yaml.safe_dump(plain(config), sort_keys=False), end="")
        sys.exit(0)
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Argparse's own complaints in the form of all others."""
        raise UserError(f"command line: {message}; --help lists all")


def option_parser() -> argparse.ArgumentParser:
    """What takes every knob from a command line, as text; its mistakes are UserErrors."""
    parser = _Parser(
        description="Trains a GPT on characters. Alone, under torchrun or under another launcher.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38),
    )
    parser.add_argument("--config", metavar="FILE", help=f"yaml file (default: {YAML.name} beside main.py)")
    parser.add_argument("--print_config", action="store_true", help="print the yaml that would run, and exit")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # from old launchers; LOCAL_RANK rules
    for section, room in SECTIONS.items():
        group = parser.add_argument_group(section, room.__doc__.split("\n")[0])
        notes = dict(re.findall(r"^ +(\w+): (.+)$", room.__doc__, re.MULTILINE))
        for f in fields(room):
            shown = json.dumps(f.default).replace('"', "")
            group.add_argument(
                f"--{section}.{f.name}", metavar="X", help=f"{notes[f.name]} (default: {shown})".replace("%", "%%")
            )
    return parser


def options_of(asked: argparse.Namespace) -> list[str]:
    """The options that a command line gave, of those that `option_parser` knows, for `read_config`."""
    given = {key: getattr(asked, key) for key in ("config", *KEYS)}
    words = [word for key, value in given.items() if value is not None for word in (f"--{key}", value)]
    return words + ["--print_config"] * asked.print_config


def _read_yaml(file: Path) -> dict[str, dict[str, Any]]:
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), _Loader) or {}
    except OSError as error:
        raise UserError(f"--config: {file} can't be read: {error.strerror}; name a yaml file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        words = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise UserError(f"{file} is not valid yaml: {words}") from error
    try:
        json.dumps(found, default=str)
    except ValueError:
        raise UserError(
            f"{file} is not valid yaml here: an alias holds itself, such as n_layer: *model in model"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{file} holds {found!r}; it must hold the sections {', '.join(SECTIONS)}")
    found = {section: keys if keys is not None else {} for section, keys in found.items()}
    mistakes = [
        f"{s}: unknown section{_nearest(str(s), SECTIONS)}; there are {', '.join(SECTIONS)}"
        for s in found
        if s not in SECTIONS
    ]
    mistakes += [
        f"{s}: found {keys!r}, must hold keys with values" for s, keys in found.items() if not isinstance(keys, dict)
    ]
    mistakes += [
        f"{s}.{key}: unknown key{_nearest(f'{s}.{key}', KEYS)}; --help lists all"
        for s, keys in found.items()
        if s in SECTIONS and isinstance(keys, dict)
        for key in keys
        if f"{s}.{key}" not in KEYS
    ]
    if mistakes:
        raise UserError("\n  ".join([f"{file}:", *mistakes]))
    return found


def _scalar(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {near[0]}" if near else ""


def _validate(found: dict[str, dict[str, Any]], origin: dict[str, str]) -> Config:
    for name, source in origin.items():
        section, _, key = name.partition(".")
        value = found[section][key]
        if any(isinstance(x, float) and not math.isfinite(x) for x in (value if isinstance(value, list) else [value])):
            raise UserError(f"{name} (in {source}): found {value!r}, must be a finite number")
    # As json, lists may become tuples and integers floats, while no text becomes a number behind one's back.
    try:
        return TypeAdapter(Config).validate_json(json.dumps(found, default=str), strict=True)
    except ValidationError as invalid:
        mistakes: dict[str, str] = {}
        for error in invalid.errors(include_url=False):
            if error["type"] == "value_error":  # what a section's __post_init__ says: it names its key
                words = error["msg"].removeprefix("Value error, ")
                name = words.split()[0]
                mistakes[words] = f" (in {origin[name]})" if name in origin else ""
                continue
            place, within, *_ = (*error["loc"], "")
            name = f"{place}.{within}"
            wanted = error["msg"].replace("Input should be ", "")
            if name in mistakes:
                mistakes[name] += f" or {wanted}"
            else:
                value = found[str(place)][str(within)]
                mistakes[name] = (
                    f" (in {origin.get(name)}): found {value!r}, must be {wanted}{HINTS.get(str(value), '')}"
                )
        raise UserError("\n  ".join(name + words for name, words in mistakes.items())) from invalid


def default_snapshot() -> str:
    """Where the snapshots are of the run that gpt2_train_cfg.yaml describes."""
    knobs = read_config().trainer
    return knobs.snapshot_path or knobs.run_dir


def code_digest() -> str:
    """SHA-256 of the rooms, so that ranks running different code notice."""
    digest = hashlib.sha256()
    for room in sorted(ROOMS.glob("*.py")):
        digest.update(room.name.encode() + room.read_bytes())
    return digest.hexdigest()


def _how_to_go_on(env: Mapping[str, str]) -> str:
    """What to do when a rank is gone: nothing where torchrun has restarts left, or had some."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS")
    if restarts is None:
        return "; the same command goes on"
    return "; start torchrun with --max_restarts=3 and it goes on by itself" if restarts == "0" else ""


def run(argv: Sequence[str]) -> int:
    """Trains as the command line says; returns the exit status."""
    speaks = True
    try:
        # One process of a machine says what they all read; one started by hand may have a yaml of its own.
        speaks = who_am_i(os.environ).local_rank in (None, 0)
        config = read_config(argv)
        speaks = True  # who comes to no group has a trouble of its own
        with connect(config.distributed, config.trainer.run_dir) as world:
            speaks = world.rank == 0  # from here on, errors are raised on all ranks alike
            world.take_device(config.distributed.backend)
            keep_freed_memory()
            facts = {f"{s}.{key}": value for s, keys in plain(config).items() for key, value in keys.items()}
            world.check_same(
                {name: value for name, value in facts.items() if name not in PLACES}
                | {"the code's SHA-256": code_digest()}
            )
            return Trainer(config, world).fit()
    except UserError as error:
        if speaks:
            complain(str(error))
        return 2
    except PeerError as error:
        complain(f"{error}{_how_to_go_on(os.environ)}")
        return 1
    except RuntimeError as error:
        if not ran_out(error):
            raise
        complain(
            f"out of memory in training: {str(error).splitlines()[0]}; lower trainer.micro_batch_size, or set "
            "trainer.activation_checkpointing to full, or with several ranks distributed.strategy to fsdp"
        )
        return 2
    except KeyboardInterrupt:  # before training, where there is nothing to save
        return 130


@record
def main() -> None:
    """The program, under torchrun as without it: a worker's traceback reaches the launcher's summary."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a path may hold what a terminal can't
    status = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written; Python's own end would abort when it meets a thread in PyTorch's C++ code


if __name__ == "__main__":
    main()
