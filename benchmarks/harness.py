"""Measures ratios of times. Two actions alternate, A B A B ..., so that other programs affect both."""

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import printable
from typing import Any

import numpy as np
import torch

from mingpt.config.parser import read_config
from mingpt.distributed.agreement import broadcast_object
from mingpt.distributed.context import DistributedContext
from mingpt.system.device import device_kind, has_bf16
from mingpt.system.threads import available_cores
from mingpt.system.torch_versions import cpu_capabilities
from trainer import Trainer

ALPHABET = list(printable[:65])  # tiny shakespeare has 65 characters, too
NO_KEYS: Mapping[str, Any] = {}


# Sizes of a model and its batch.
SMALL = {
    "model.n_layer": 4,
    "model.n_head": 4,
    "model.n_embd": 128,
    "data.block_size": 64,
    "trainer.batch_size": 12,
}
MEDIUM = {
    "model.n_layer": 6,
    "model.n_head": 6,
    "model.n_embd": 384,
    "data.block_size": 128,
    "trainer.batch_size": 16,
}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        what: name of the measurement
        figure: median, or the reason why it is missing
        smallest, largest: of all pairs; None if there is only one value
        unit: suffix of the numbers
    """

    what: str
    figure: float | str
    smallest: float | None = None
    largest: float | None = None
    unit: str = ""

    def format(self, value: float | str) -> str:
        """Formats a number with the unit of this row, and returns text unchanged."""
        if isinstance(value, str):
            return value
        return (f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}") + self.unit

    @property
    def cells(self) -> list[str]:
        """Name, median, and range."""
        spread = " to ".join(self.format(end) for end in (self.smallest, self.largest) if end is not None)
        return [self.what, self.format(self.figure), spread]


def median_row(what: str, values: Sequence[float], unit: str = "") -> Row:
    """Returns a row with the median, the smallest and the largest value."""
    return Row(what, statistics.median(values), min(values), max(values), unit)


def to_options(values: Mapping[str, Any]) -> list[str]:
    """Returns values of keys, such as `trainer.batch_size`, as options of main.py."""
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def suppress_stdout() -> redirect_stdout[io.StringIO]:
    return redirect_stdout(io.StringIO())


@dataclass
class Bench:
    """The state that all benchmarks of a run share.

    Args:
        context: this process's rank and device
        folder: folder for all files
        options: options of main.py for all trainers
        baselines: folder of each other project, with its model.py
        pairs: number of measurements of each ratio
        min_run_time: approximate seconds of repeated calls, if one call takes less time
    """

    context: DistributedContext
    folder: Path
    options: Sequence[str] = ()
    baselines: Mapping[str, Path] = field(default_factory=dict)
    pairs: int = 7
    min_run_time: float = 0.5

    @property
    def is_on_gpu(self) -> bool:
        return self.context.device.type == "cuda"

    @cached_property
    def text(self) -> Path:
        """A file of a million random characters. The content does not affect speed."""
        file = self.folder / f"text{self.context.rank}.txt"
        file.write_text("".join(np.random.default_rng(0).choice(ALPHABET, 10**6)))
        return file

    def build_trainer(
        self, defaults: Mapping[str, Any] = NO_KEYS, overrides: Mapping[str, Any] = NO_KEYS, warmup_steps: int = 3
    ) -> Trainer:
        """Builds a trainer with a new run folder, and trains some steps.

        Options of the command line override `defaults`, and `overrides` override both.
        """
        paths = {"data.path": self.text, "trainer.run_dir": tempfile.mkdtemp(dir=self.folder)}
        options = [*to_options({**paths, **defaults}), *self.options, *to_options(overrides)]
        with suppress_stdout():
            trainer = Trainer(read_config(options), self.context)
        for _ in range(warmup_steps):
            trainer.train_step()
        return trainer

    def time_calls(self, action: Callable[[], Any], times: int = 1) -> float:
        """Returns the seconds of all calls together, including the work that they start on the device."""
        self._synchronize()
        began = time.perf_counter()
        for _ in range(times):
            action()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        """Waits for a GPU. Its kernels still run when the calls that start them have returned."""
        if self.is_on_gpu:
            torch.accelerator.synchronize(self.context.device)

    def ratio(self, action: Callable[[], Any], reference: Callable[[], Any]) -> list[float]:
        """Returns the time of an action relative to the time of a reference, for each pair of measurements.

        Each measurement repeats its action for about `min_run_time`.
        """
        action()  # the first calls are slower
        reference()
        seconds = self.time_calls(action) + self.time_calls(reference)
        times = broadcast_object(self.context, max(1, round(2 * self.min_run_time / seconds)))
        return [self.time_calls(action, times) / self.time_calls(reference, times) for _ in range(self.pairs)]


def machine_name(device: torch.device) -> str:
    """Returns GPU or CPU, number of cores, bf16 support and PyTorch's version."""
    cpu = cpu_capabilities().get("cpu_name", "unknown CPU")
    bf16 = "bf16 in hardware" if has_bf16(device)[0] else "no bf16 hardware"
    gpu = f"{device_kind(device)} with " if device.type == "cuda" else ""
    return f"{gpu}{cpu}, {len(available_cores())} cores, {bf16}, PyTorch {torch.__version__}"
