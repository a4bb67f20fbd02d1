"""The case survive: a step with distributed.survive beside one without."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks.harness import Bench, Row, median_row
from mingpt.distributed.health import HealthMonitor
from mingpt.distributed.launch_environment import RankInfo
from mingpt.survive.context import SurvivingContext
from mingpt.survive.liveness import LOOPBACK
from mingpt.survive.supervisor import REPORT_FD
from trainer import Trainer


def survive(bench: Bench) -> Iterator[Row]:
    """A step with distributed.survive, in steps without it."""
    overrides: dict[str, Any] = {"distributed.reduction": "tree", "trainer.micro_batch_size": 3, "trainer.threads": 1}
    without = bench.build_trainer(overrides=overrides)
    with open_surviving_context(bench) as context:
        options = overrides | {"distributed.survive": "true"}
        surviving = bench.build_trainer(overrides=options, context=context, warmup_steps=0)
        context.regroup(surviving.step)
        ratios = bench.ratio(lambda: step_and_vote(surviving), lambda: step_and_vote(without))
        yield median_row(f"a step with survive in one without, {context.world_size} ranks", ratios)


@contextmanager
def open_surviving_context(bench: Bench) -> Iterator[SurvivingContext]:
    """The context of a trainer on the same ranks, all of one machine, without a supervisor."""
    health: HealthMonitor = bench.context.health  # type: ignore[assignment]  # there is one with several ranks
    info = RankInfo(bench.context.rank, bench.context.world_size, bench.context.local_rank)
    os.environ[REPORT_FD] = str(os.open(os.devnull, os.O_WRONLY))
    store = dist.PrefixStore("survive", health.store)
    timeout = timedelta(seconds=health.timeout_seconds)
    context = SurvivingContext(info, store, LOOPBACK, timeout)
    try:
        yield context
    finally:
        context.membership.leave()


def step_and_vote(trainer: Trainer) -> None:
    """A step with all collectives of the training loop."""
    flags = trainer.context.all_reduce_flags(0, 0)
    trainer.train_step()
    flags.wait()
