"""How is speed measured? Two things in turn, A B A B ..., and their ratio: what disturbs one disturbs the other."""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import torch

from mingpt.config_parser import read_config
from mingpt.distributed.process_group import DistributedContext
from mingpt.utils.device import check_compiler, choose_precision, has_bf16
from mingpt.utils.errors import UserError
from trainer import Trainer

ROOT = Path(__file__).parent.parent
ALPHABET = "\n !$&',-.3:;?" + ascii_letters  # the 65 characters of Shakespeare's plays as Karpathy gathered them
CPU = torch.device("cpu")
UNITS = {"": (1, ""), "%": (100, "%"), "s": (1, " s"), "steps": (1, " steps")}


class SkippedError(Exception):
    """This machine, or this command line, can't make the measurement; says why."""


@dataclass(frozen=True)
class Shape:
    """A model and its batch: n_layer, n_head, n_embd, block_size (T) and batch_size (B)."""

    layers: int
    heads: int
    width: int
    T: int
    B: int

    def __str__(self) -> str:
        return f"{self.layers} layers {self.width} wide, T {self.T}, batch {self.B}"

    @property
    def words(self) -> list[str]:
        """The options of main.py that ask for it."""
        keys = ("model.n_layer", "model.n_head", "model.n_embd", "data.block_size", "trainer.batch_size")
        sizes = (self.layers, self.heads, self.width, self.T, self.B)
        return [word for key, size in zip(keys, sizes, strict=True) for word in (f"--{key}", str(size))]


SMALL, MIDDLE, WIDE = Shape(4, 4, 128, 64, 12), Shape(6, 6, 384, 128, 16), Shape(8, 8, 512, 128, 16)


@dataclass(frozen=True)
class Mode:
    """What depends on the hardware: how ours trains beside others, and the least that others' steps take in ours.

    Args:
        words: options of main.py
        nanogpt: goals at SMALL, MIDDLE and WIDE
        tutorial: the same
    """

    words: tuple[str, ...]
    nanogpt: tuple[float, float, float]
    tutorial: tuple[float, float, float]


WITH_BF16 = Mode((), (1.4, 2.5, 2.5), (2.5, 2.5, 2.5))
WITHOUT_BF16 = Mode(("--trainer.compile", "true"), (1.25, 1.08, 1.08), (1.8, 1.3, 1.3))


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        what: what it is
        figure: the median, or why there is none
        smallest, largest: of all pairs; None where there is one value, or none
        unit: a key of UNITS; shares of 1 are shown as %
        least, most: the goal
    """

    what: str
    figure: float | str
    smallest: float | None = None
    largest: float | None = None
    unit: str = ""
    least: float | None = None
    most: float | None = None

    def shown(self, number: float) -> str:
        """A number in this row's unit."""
        factor, name = UNITS[self.unit]
        number *= factor
        return (f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}") + name

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal or a figure."""
        if isinstance(self.figure, str):
            return None
        if self.least is not None:
            return self.figure >= self.least
        return None if self.most is None else self.figure <= self.most

    @property
    def goal(self) -> str:
        """In words, and whether it is missed."""
        words = "none"
        if self.least is not None:
            words = f"at least {self.shown(self.least)}"
        elif self.most is not None:
            words = f"at most {self.shown(self.most)}"
        return words + (" (missed)" if self.met is False else "")

    @property
    def cells(self) -> list[str]:
        """What, figure, smallest to largest, goal."""
        figure = self.figure if isinstance(self.figure, str) else self.shown(self.figure)
        spread = " to ".join(self.shown(end) for end in (self.smallest, self.largest) if end is not None)
        return [self.what, figure, spread, self.goal]


def row(what: str, values: Sequence[float], unit: str = "", **goal: float) -> Row:
    """A row of these values' median, smallest and largest.

    Args:
        what: what they are
        values: one for each pair
        unit: a key of UNITS
        goal: `least` or `most`
    """
    smallest, largest = (min(values), max(values)) if len(values) > 1 else (None, None)
    return Row(what, statistics.median(values), smallest, largest, unit, **goal)


def time_calls(action: Callable[[], Any], times: int = 1) -> float:
    """Seconds that an action takes, all times together."""
    began = time.perf_counter()
    for _ in range(times):
        action()
    return time.perf_counter() - began


def silenced() -> redirect_stdout[io.StringIO]:
    """A block whose prints nobody sees."""
    return redirect_stdout(io.StringIO())


@dataclass
class Bench:
    """Where and how measurements are made.

    Args:
        world: the ranks
        folder: for whatever is written
        words: options of main.py, for all trainers
        nanogpt, tutorial: folders with the model.py of those, or None
        pairs: how often each of two things is measured
        patience: about how many seconds one half of a pair takes, where one step takes less
    """

    context: DistributedContext
    folder: Path
    words: Sequence[str] = ()
    nanogpt: Path | None = None
    tutorial: Path | None = None
    pairs: int = 7
    patience: float = 0.5

    @cached_property
    def text(self) -> Path:
        """A file of a million characters out of 65, as many as the usual first text has; which ones costs nothing."""
        file = self.folder / f"text{self.context.rank}.txt"
        file.write_text("".join(np.random.default_rng(0).choice(list(ALPHABET), 10**6)))
        return file

    @property
    def mode(self) -> Mode:
        """What depends on the hardware, and on the precision if the command line asks for one."""
        precision, _ = choose_precision(read_config(self.words).trainer.precision, CPU, None)
        return WITH_BF16 if precision == "bf16" else WITHOUT_BF16

    def options(self, words: Sequence[str] = (), keys: Mapping[str, Any] | None = None) -> list[str]:
        """Options of main.py for a run of its own: `words`, over which the command line wins, over which `keys` win."""
        run = {"data.path": self.text, "trainer.run_dir": tempfile.mkdtemp(dir=self.folder)}
        first, last = ([w for k, value in part.items() for w in (f"--{k}", str(value))] for part in (run, keys or {}))
        return [*first, *words, *self.words, *last]

    def trainer(
        self,
        words: Sequence[str] = (),
        keys: Mapping[str, Any] | None = None,
        context: DistributedContext | None = None,
        warm: int = 3,
    ) -> Trainer:
        """A trainer with a run of its own.

        Args:
            words, keys: as in `options`
            world: its ranks, if not all of them
            warm: steps that it has made
        """
        with silenced():
            made = Trainer(read_config(self.options(words, keys)), context or self.context)
        time_calls(made.train_step, warm)
        return made

    def ratio(
        self, one: Callable[[], Any], other: Callable[[], Any], before: Callable[[], Any] = lambda: None, times: int = 0
    ) -> list[float]:
        """Seconds of one thing in seconds of the other, measured in turn; one ratio for each pair.

        Args:
            one: what is measured
            other: what it is measured in
            before: comes before each, and is not measured
            times: how often each runs in a pair; 0: as often as `patience` allows
        """
        pair = 0.0
        for action in (one, other):
            before()
            action()
            before()
            pair += time_calls(action)
        times = self.context.broadcast_object(times or max(1, round(2 * self.patience / pair)))
        ratios = []
        for _ in range(self.pairs):
            halves = []
            for action in (one, other):
                before()
                halves.append(time_calls(action, times))
            ratios.append(halves[0] / halves[1])
        return ratios

    def needs_clone(self, folder: Path | None) -> Path:
        """The folder; raises SkippedError where the command line gave none."""
        if folder is None:
            raise SkippedError("its folder is not given")
        return folder

    def needs_cores(self, ranks: int) -> None:
        """Raises SkippedError where there are fewer cores than ranks."""
        if cores() < ranks:
            raise SkippedError(f"{ranks} ranks on {cores()} core")

    def needs_compiler(self) -> None:
        """Raises SkippedError where torch.compile finds no compiler."""
        try:
            check_compiler(CPU)
        except UserError as error:
            raise SkippedError(str(error)) from error

    def on_ranks(self, name: str, ranks: int = 2) -> Iterator[Row]:
        """The rows of a measurement on ranks that torchrun starts.

        Raises:
            SkippedError: fewer cores.
            RuntimeError: a rank failed; with what it said.
        """
        self.needs_cores(ranks)
        for found in from_ranks(ranks, cores() // ranks, "bench.py", name, *self.words):
            yield Row(**{key: found[key] for key in Row.__dataclass_fields__})


def from_ranks(ranks: int, threads: int, *words: str) -> Iterator[dict[str, Any]]:
    """The objects that a program prints with --json, on ranks that torchrun starts with so many threads each.

    Raises:
        RuntimeError: a rank failed; with what it said.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, *words, "--json"]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(  # noqa: S603
            command,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=ROOT,
        ) as process:
            yield from map(json.loads, process.stdout or ())
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{said.read()}")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """The hardware that figures are of, in words."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    bf16 = "bf16 in hardware" if has_bf16(CPU)[0] else "no bf16 hardware"
    return f"{models[0] if models else 'unknown CPU'}, {cores()} cores, {bf16}, PyTorch {torch.__version__}"
