"""SIGKILL of all ranks after every step of a run: it ends in the same bits."""

import os
import signal
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import assert_same_run
from tests.helpers import call_before, run_args, run_ranks, start_ranks, train_main, train_run
from trainer import Trainer

STEPS = 7


@pytest.mark.slow
@pytest.mark.parametrize(("world_sizes", "reduction"), [([3], "fast"), ([4, 3, 1, 2], "tree")])
def test_a_kill_after_every_step_changes_no_bit(
    world_sizes: list[int], reduction: str, text: Path, tmp_path: Path
) -> None:
    """With dropout, accumulation, uneven shares and a snapshot every 3 steps, which may be unfinished at the kill."""
    options = {"trainer__max_steps": STEPS, "distributed__reduction": reduction}
    whole = train_run(tmp_path / "whole", text, world_sizes[0], **options)
    killed = run_args(tmp_path / "killed", text, **options)
    for step, world_size in zip(range(1, STEPS + 1), cycle(world_sizes), strict=False):
        processes, _ = start_ranks(world_size, _train_and_kill_after, step, *killed, tmp_path=tmp_path)
        for process in processes:
            process.join(60)
        assert {process.exitcode for process in processes} == {-signal.SIGKILL}, step
    assert set(run_ranks(world_sizes[0], train_main, *killed, tmp_path=tmp_path)) == {0}
    assert_same_run(whole, tmp_path / "killed")


def _train_and_kill_after(last: int, *argv: str) -> None:
    def kill(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    # In the next step, if there is one, so that what follows this step, such as a save, has begun.
    call_before(Trainer, "after_step" if last == STEPS else "train_step", kill)
    train_main(*argv)
