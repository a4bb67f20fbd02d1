"""Measures ratios: two actions alternate, A B A B ..., so that a disturbance of the machine affects both."""

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
from mingpt.distributed.collectives import DistributedContext
from mingpt.errors import UserError
from mingpt.hardware.device import check_compiler, device_kind, has_bf16
from trainer import Trainer

ROOT = Path(__file__).parent.parent
ALPHABET = "\n !$&',-.3:;?" + ascii_letters  # the 65 characters of the Tiny Shakespeare data set
CPU = torch.device("cpu")
# name -> factor, digits and suffix
UNITS = {"": (1, 3, ""), "%": (100, 3, "%"), "s": (1, 3, " s"), "steps": (1, 3, " steps"), "nats": (1, 4, " nats")}


class SkippedError(Exception):
    """The benchmark can't run on this machine or with these options; the message is the reason."""


@dataclass(frozen=True)
class Shape:
    """The size of a model and its batch: n_layer, n_head, n_embd, block_size (T) and batch_size (B)."""

    layers: int
    heads: int
    width: int
    T: int
    B: int

    def __str__(self) -> str:
        return f"{self.layers} layers {self.width} wide, T {self.T}, batch {self.B}"

    @property
    def options(self) -> list[str]:
        """The options of main.py that select it."""
        keys = ("model.n_layer", "model.n_head", "model.n_embd", "data.block_size", "trainer.batch_size")
        sizes = (self.layers, self.heads, self.width, self.T, self.B)
        return to_options(dict(zip(keys, sizes, strict=True)))


SMALL = Shape(4, 4, 128, 64, 12)
MEDIUM = Shape(6, 6, 384, 128, 16)


@dataclass(frozen=True)
class Row:
    """A result.

    Args:
        what: what was measured
        figure: the median, or why there is none
        smallest, largest: of all pairs; None if there is only one value
        unit: a key of UNITS; fractions of 1 are shown in %
    """

    what: str
    figure: float | str
    smallest: float | None = None
    largest: float | None = None
    unit: str = ""

    def format(self, number: float) -> str:
        """Formats a number in the unit of this row."""
        factor, digits, suffix = UNITS[self.unit]
        number *= factor
        return (f"{number:.{digits}g}" if abs(number) < 1000 else f"{number:,.0f}") + suffix

    @property
    def cells(self) -> list[str]:
        """What, figure, smallest to largest."""
        figure = self.figure if isinstance(self.figure, str) else self.format(self.figure)
        spread = " to ".join(self.format(end) for end in (self.smallest, self.largest) if end is not None)
        return [self.what, figure, spread]


def median_row(what: str, values: Sequence[float], unit: str = "") -> Row:
    """The row of the values' median, smallest and largest."""
    if len(values) == 1:
        return Row(what, values[0], unit=unit)
    return Row(what, statistics.median(values), min(values), max(values), unit)


def synchronize(device: torch.device) -> None:
    """Waits for the work of a GPU, whose kernels run after the calls that start them have returned."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def to_options(values: Mapping[str, Any]) -> list[str]:
    """Values of keys such as `trainer.batch_size` as options of main.py."""
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def max_relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def suppress_stdout() -> redirect_stdout[io.StringIO]:
    return redirect_stdout(io.StringIO())


@dataclass
class Bench:
    """What all benchmarks of a run share.

    Args:
        context: the ranks
        folder: for all files
        options: options of main.py for all trainers
        nanogpt, tutorial: folders with these projects' model.py, or None
        pairs: number of measurements of each ratio
        min_run_time: approximate seconds for which each action of a pair is repeated, if one call takes less
    """

    context: DistributedContext
    folder: Path
    options: Sequence[str] = ()
    nanogpt: Path | None = None
    tutorial: Path | None = None
    pairs: int = 7
    min_run_time: float = 0.5

    @cached_property
    def text(self) -> Path:
        """A file of a million random characters from an alphabet of 65; content does not affect speed."""
        file = self.folder / f"text{self.context.rank}.txt"
        file.write_text("".join(np.random.default_rng(0).choice(list(ALPHABET), 10**6)))
        return file

    def run_options(self, options: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> list[str]:
        """Options of main.py for a run folder of its own: `options`, then those of the command line, then `overrides`.

        Of several values for a key, the last is used.
        """
        paths = {"data.path": self.text, "trainer.run_dir": tempfile.mkdtemp(dir=self.folder)}
        return [*to_options(paths), *options, *self.options, *to_options(overrides or {})]

    def build_trainer(
        self,
        options: Sequence[str] = (),
        overrides: Mapping[str, Any] | None = None,
        context: DistributedContext | None = None,
        warmup_steps: int = 3,
    ) -> Trainer:
        """A trainer in a run folder of its own.

        Args:
            options, overrides: as in `run_options`
            context: its ranks; None: all
            warmup_steps: number of steps to take before it is returned
        """
        with suppress_stdout():
            trainer = Trainer(read_config(self.run_options(options, overrides)), context or self.context)
            trainer.resume()
        for _ in range(warmup_steps):
            trainer.train_step()
        return trainer

    def time_calls(self, action: Callable[[], Any], times: int = 1) -> float:
        """Seconds that all these calls take together, with the device's work that they start."""
        synchronize(self.context.device)
        began = time.perf_counter()
        for _ in range(times):
            action()
        synchronize(self.context.device)
        return time.perf_counter() - began

    def ratio(
        self,
        action: Callable[[], Any],
        reference: Callable[[], Any],
        before: Callable[[], Any] = lambda: None,
        times: int = 0,
    ) -> list[float]:
        """Time of an action relative to that of a reference, for each pair of measurements.

        Args:
            action: the numerator
            reference: the denominator
            before: called before each measurement, and not measured
            times: number of calls per measurement; 0: as many as take `min_run_time`
        """
        pair = 0.0
        for call in (action, reference):
            before()
            call()
            before()
            pair += self.time_calls(call)
        times = self.context.broadcast_object(times or max(1, round(2 * self.min_run_time / pair)))
        ratios = []
        for _ in range(self.pairs):
            seconds = []
            for call in (action, reference):
                before()
                seconds.append(self.time_calls(call, times))
            ratios.append(seconds[0] / seconds[1])
        return ratios

    def require_folder(self, folder: Path | None) -> Path:
        """Returns the folder of another project; raises SkippedError without one."""
        if folder is None:
            raise SkippedError("its folder is not given")
        return folder

    def require_processors(self, ranks: int) -> None:
        """Raises SkippedError if there are fewer cores, or GPUs, than ranks."""
        on_gpu = self.context.device.type == "cuda"
        processors = torch.cuda.device_count() if on_gpu else available_cores()
        if processors < ranks:
            raise SkippedError(f"{ranks} ranks on {processors} {'GPU' if on_gpu else 'core'}")

    def require_cpu(self, reason: str) -> None:
        """Raises SkippedError if this benchmark, which is about CPUs, would run on a GPU."""
        if self.context.device.type != "cpu":
            raise SkippedError(f"{reason}; to run it on the CPU: --distributed.backend gloo")

    def require_compiler(self) -> None:
        """Raises SkippedError if torch.compile finds no compiler."""
        try:
            check_compiler(self.context.device)
        except UserError as error:
            raise SkippedError(str(error)) from error

    def run_on_ranks(self, name: str, ranks: int = 2) -> Iterator[Row]:
        """Runs a case of this program under torchrun.

        Raises:
            SkippedError: there are fewer cores, or GPUs, than ranks.
            RuntimeError: a rank failed.
        """
        self.require_processors(ranks)
        threads = max(1, available_cores() // ranks)
        for result in torchrun(ranks, threads, name, *self.options):
            yield Row(**{key: result[key] for key in Row.__dataclass_fields__})


def torchrun(ranks: int, threads: int, *argv: str) -> Iterator[dict[str, Any]]:
    """Runs `python -m benchmarks --json` under torchrun; yields the objects that it prints.

    Args:
        ranks: number of processes
        threads: number of threads per process
        argv: the arguments of the program

    Raises:
        RuntimeError: a rank failed; the message has its stderr.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "benchmarks", *argv, "--json"]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as stderr:
        with subprocess.Popen(  # noqa: S603
            command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT
        ) as process:
            for line in process.stdout or ():
                yield json.loads(line)
        if process.returncode:
            stderr.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{stderr.read()}")


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_name(device: torch.device = CPU) -> str:
    """GPU or CPU, cores, bf16 support and PyTorch's version."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    bf16 = "bf16 in hardware" if has_bf16(device)[0] else "no bf16 hardware"
    cpu = f"{models[0] if models else 'unknown CPU'}, {available_cores()} cores"
    gpu = f"{device_kind(device)} with " if device.type == "cuda" else ""
    return f"{gpu}{cpu}, {bf16}, PyTorch {torch.__version__}"
