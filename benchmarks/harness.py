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
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from string import printable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mingpt.config.parser import read_config
from mingpt.config.schema import Config
from mingpt.distributed.agreement import broadcast_object
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import detect_launch_environment
from mingpt.distributed.process_group import connected_ranks, destroy_process_group, explained_errors
from mingpt.monitoring.logging import set_rank
from mingpt.system.device import device_kind, has_bf16, use_cuda
from mingpt.system.threads import available_cores
from mingpt.system.torch_versions import cpu_capabilities
from trainer import Trainer

ROOT = Path(__file__).parent.parent
ALPHABET = list(printable[:65])  # as many characters as Tiny Shakespeare has
RANKS = 2  # of cases that start several
NO_KEYS: Mapping[str, Any] = {}


class SkippedError(Exception):
    """The benchmark can't run on this machine or with these options; the message is the reason."""


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
    """A result.

    Args:
        what: what was measured
        figure: the median, or why there is none
        smallest, largest: of all pairs; None if there is only one value
        unit: what is written behind the numbers
    """

    what: str
    figure: float | str
    smallest: float | None = None
    largest: float | None = None
    unit: str = ""

    def format(self, value: float | str) -> str:
        """Formats a number in the unit of this row; text stays as it is."""
        if isinstance(value, str):
            return value
        return (f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}") + self.unit

    @property
    def cells(self) -> list[str]:
        """What, figure, smallest to largest."""
        spread = " to ".join(self.format(end) for end in (self.smallest, self.largest) if end is not None)
        return [self.what, self.format(self.figure), spread]


def median_row(what: str, values: Sequence[float], unit: str = "") -> Row:
    """The row of the values' median, smallest and largest."""
    return Row(what, statistics.median(values), min(values), max(values), unit)


def to_options(values: Mapping[str, Any]) -> list[str]:
    """Values of keys such as `trainer.batch_size` as options of main.py."""
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def suppress_stdout() -> redirect_stdout[io.StringIO]:
    return redirect_stdout(io.StringIO())


@contextmanager
def process_group(config: Config) -> Iterator[DistributedContext]:
    """The ranks that a launcher has started, or one process; errors are explained as in main.py."""
    info = detect_launch_environment(os.environ)
    set_rank(info.rank)
    backend = "cpu:gloo,cuda:nccl" if use_cuda(config.distributed.backend) else "gloo"
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    health = None
    if info.world_size > 1:
        with connected_ranks(info, config.distributed, config.trainer.run_dir, backend) as (store, health):
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with explained_errors(info, health):
        yield DistributedContext(info, config.distributed, health)
    destroy_process_group()


@dataclass
class Bench:
    """What all benchmarks of a run share.

    Args:
        context: the ranks
        folder: for all files
        options: options of main.py for all trainers
        baselines: the folders of other projects with their model.py, by name
        pairs: number of measurements of each ratio
        min_run_time: approximate seconds for which each action of a pair is repeated, if one call takes less
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
        """A file of a million random characters ; content does not affect speed."""
        file = self.folder / f"text{self.context.rank}.txt"
        file.write_text("".join(np.random.default_rng(0).choice(ALPHABET, 10**6)))
        return file

    def build_trainer(
        self, defaults: Mapping[str, Any] = NO_KEYS, overrides: Mapping[str, Any] = NO_KEYS, warmup_steps: int = 3
    ) -> Trainer:
        """A trainer in a run folder of its own, which has taken some steps.

        Of several values for a key, the last is used: `defaults`, then the command line, then `overrides`.
        """
        paths = {"data.path": self.text, "trainer.run_dir": tempfile.mkdtemp(dir=self.folder)}
        options = [*to_options({**paths, **defaults}), *self.options, *to_options(overrides)]
        with suppress_stdout():
            trainer = Trainer(read_config(options), self.context)
        for _ in range(warmup_steps):
            trainer.train_step()
        return trainer

    def time_calls(self, action: Callable[[], Any], times: int = 1) -> float:
        """Seconds that all these calls take together, with the device's work that they start."""
        self._synchronize()
        began = time.perf_counter()
        for _ in range(times):
            action()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        """Waits for the work of a GPU, whose kernels run after the calls that start them have returned."""
        if self.is_on_gpu:
            torch.accelerator.synchronize(self.context.device)

    def ratio(self, action: Callable[[], Any], reference: Callable[[], Any]) -> list[float]:
        """Time of an action relative to that of a reference, for each pair of measurements.

        Each measurement has as many calls as take `min_run_time`.
        """
        action()  # the first calls are slower
        reference()
        seconds = self.time_calls(action) + self.time_calls(reference)
        times = broadcast_object(self.context, max(1, round(2 * self.min_run_time / seconds)))
        return [self.time_calls(action, times) / self.time_calls(reference, times) for _ in range(self.pairs)]

    def run_on_ranks(self, name: str) -> Iterator[Row]:
        """The rows of a case under torchrun, on several ranks, each with its share of the cores.

        Raises:
            SkippedError: there are fewer cores, or GPUs, than ranks.
            RuntimeError: a rank failed; the message has its stderr.
        """
        processors = torch.cuda.device_count() if self.is_on_gpu else len(available_cores())
        if processors < RANKS:
            raise SkippedError(f"it starts {RANKS} ranks, which need a core or GPU each; found {processors}")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        command = [sys.executable, *launcher, "-m", "benchmarks", name, *self.options, "--json"]
        env = os.environ | {"OMP_NUM_THREADS": str(max(1, len(available_cores()) // RANKS))}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        for line in done.stdout.splitlines():
            result = json.loads(line)
            yield Row(**{key: result[key] for key in Row.__dataclass_fields__})


def machine_name(device: torch.device) -> str:
    """GPU or CPU, cores, bf16 support and PyTorch's version."""
    cpu = cpu_capabilities().get("cpu_name", "unknown CPU")
    bf16 = "bf16 in hardware" if has_bf16(device)[0] else "no bf16 hardware"
    gpu = f"{device_kind(device)} with " if device.type == "cuda" else ""
    return f"{gpu}{cpu}, {len(available_cores())} cores, {bf16}, PyTorch {torch.__version__}"
