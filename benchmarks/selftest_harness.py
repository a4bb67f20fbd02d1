"""What the checks of selftest.py share: the test's options and text, trainers of a check, and curves of a run."""

import gc
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Bench, Shape, SkippedError, to_options
from mingpt.distributed.process_group import DistributedContext
from mingpt.snapshot.storage import fingerprint
from trainer import Trainer

Overrides = dict[str, Any]  # options of main.py, by key
FP16_SCALE = 2.0**10  # at GradScaler's own first scale, steps may overflow and be skipped


class CheckFailedError(Exception):
    """A check found something wrong; the message says what."""


class Curve(NamedTuple):
    """Losses and gradient norms of a run's steps, and a digest of its state at the end."""

    losses: list[float]
    norms: list[float]
    digest: str


class SelfTest(Bench):
    """What all checks of a self-test share.

    Attributes:
        faults: the names of those injected so far
    """

    @cached_property
    def faults(self) -> list[str]:
        return []

    @cached_property
    def fault_dir(self) -> str:
        """The run folder of the run that faults interrupt."""
        return tempfile.mkdtemp(dir=self.folder)

    @cached_property
    def text(self) -> Path:
        """100,000 characters that a model learns within some steps, and the defaults of all keys beside it."""
        words = ["anna", "bob", "does", "eat", "figs", "\n"]
        file = self.folder / f"text{self.context.rank}.txt"
        file.write_text(" ".join(np.random.default_rng(0).choice(words, 25_000))[:100_000])
        file.with_suffix(".yaml").touch()
        return file

    def run_options(self, options: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> list[str]:
        """As in Bench, with the default of all other keys, whatever gpt2_train_cfg.yaml has."""
        return ["--config", str(self.text.with_suffix(".yaml")), *super().run_options(options, overrides)]


def share_groups(context: DistributedContext) -> None:
    """Makes trainers with equal process groups share them, since NCCL's buffers for each take memory on the GPU."""
    subgroup, made = context.subgroup, dict[Any, DistributedContext]()

    def subgroup_once(groups: Iterable[Sequence[int]], description: str | None = None) -> DistributedContext:
        ranks = tuple(map(tuple, groups))
        if (ranks, description) not in made:
            made[ranks, description] = subgroup(ranks, description)
        return made[ranks, description]

    context.subgroup = subgroup_once  # type: ignore[method-assign]


def tiny_options(world_size: int) -> list[str]:
    """Options of main.py for a model of 0.1M parameters, with two micro-batches per rank or more."""
    values = {
        "model.dropout": 0.1,
        "optimizer.warmup_steps": 4,
        "trainer.max_steps": 40,
        "trainer.micro_batch_size": 2,
        "trainer.precision": "fp32",
        "trainer.threads": 1,
        "distributed.timeout_seconds": 120,
    }
    return [*Shape(2, 2, 64, 32, 4 * max(2, world_size)).options, *to_options(values)]


def strategy_options(test: SelfTest) -> dict[str, Overrides]:
    """The options that select each strategy that this number of ranks allows."""
    found: dict[str, Overrides] = {name: {"distributed.strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp")}
    found["tree"] = {"distributed.reduction": "tree"}
    if on_gpu(test):  # which the tree requires there
        found["tree"]["trainer.deterministic"] = "true"
    if test.context.world_size % 2 == 0:
        found["2 stages"] = {"distributed.pipeline_stages": 2}
    return found


def on_gpu(test: Bench) -> bool:
    return test.context.device.type == "cuda"


def require_gpu(test: SelfTest, reason: str = "it needs a CUDA GPU") -> None:
    if not on_gpu(test):
        raise SkippedError(reason)


@contextmanager
def open_trainer(
    test: SelfTest,
    overrides: Mapping[str, Any],
    options: Sequence[str] | None = None,
    context: DistributedContext | None = None,
    warmup_steps: int = 0,
) -> Iterator[Trainer]:
    """A trainer as `Bench.build_trainer` makes it, by default with `tiny_options`; exit releases its process groups."""
    gc.collect()  # an earlier trainer locks its run folder, and holds memory
    if on_gpu(test):
        torch.cuda.empty_cache()
    options = tiny_options(test.context.world_size) if options is None else options
    callbacks = test.context.exit_callbacks
    before = len(callbacks)
    try:
        trainer = test.build_trainer(options, overrides, context, warmup_steps)
        yield trainer
        trainer.snapshots.writer.wait()
    finally:
        while len(callbacks) > before:
            callbacks.pop()()
        torch.use_deterministic_algorithms(False)


def full_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Copies of all parameters and of their optimizer state, on the CPU of each rank."""
    return {
        name: {key: tensor.cpu().clone() for key, tensor in {"": weight, **state}.items()}
        for name, weight, state in trainer.strategy.iter_full_state()
    }


def train_curve(
    test: SelfTest, overrides: Mapping[str, Any], steps: int, context: DistributedContext | None = None
) -> Curve:
    """Trains a run of its own, or one that resumes in `trainer.run_dir`, and saves its last step there."""
    losses, norms = [], []
    with open_trainer(test, overrides, context=context) as trainer:
        if trainer.strategy.scaler.is_enabled():
            trainer.strategy.scaler.scale(torch.zeros((), device=trainer.context.device))  # creates the scale
            trainer.strategy.scaler.update(FP16_SCALE)
        for _ in range(steps):
            result = trainer.train_step()
            losses.append(trainer.strategy.mean_loss(result.losses).item())
            norms.append(result.grad_norm.item())
        trainer.save_snapshot(None, is_last=True)
        return Curve(losses, norms, fingerprint(full_state(trainer)))
