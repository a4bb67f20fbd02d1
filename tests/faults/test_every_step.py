"""Killed after each step in turn, a run ends in the same bits; with the tree, on other numbers of processes too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from helpers import FORKSERVER, _rank, assert_equal_snapshots, clean_env, loss_curve, run_args, run_ranks, train_main

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.mark.parametrize("numbers", [[1], [2], [3], [4]])
def test_killed_after_every_step(numbers: list[int], text: Path, tmp_path: Path) -> None:
    """Dropout, accumulation and uneven shares; a snapshot every three steps, whole or not at the moment of the kill."""
    _same_bits_after_all(numbers, text, tmp_path, {})


def test_killed_after_every_step_and_gone_on_with_another_number_of_processes(text: Path, tmp_path: Path) -> None:
    _same_bits_after_all([4, 3, 1, 2], text, tmp_path, {"distributed__reduction": "tree"})


def _same_bits_after_all(numbers: list[int], text: Path, tmp_path: Path, knobs: dict[str, Any]) -> None:
    whole, killed = (run_args(tmp_path / name, text, trainer__max_steps=STEPS, **knobs) for name in ("whole", "killed"))
    assert run_ranks(numbers[0], train_main, *whole, tmp_path=tmp_path) == [0] * numbers[0]
    for step, number in zip(range(1, STEPS + 1), cycle(numbers), strict=False):
        processes = _start(number, tmp_path / f"meeting-{step}", _train_and_die, step, *killed)
        assert {process.exitcode for process in processes} == {-signal.SIGKILL}, step
    assert run_ranks(numbers[0], train_main, *killed, tmp_path=tmp_path) == [0] * numbers[0]
    assert_equal_snapshots(tmp_path / "whole", tmp_path / "killed")
    assert loss_curve(tmp_path / "whole") == loss_curve(tmp_path / "killed")


def _start(number: int, meeting: Path, body: Callable[..., Any], *args: Any) -> list[Any]:
    queue = FORKSERVER.SimpleQueue()
    processes = [
        FORKSERVER.Process(target=_rank, args=(queue, rank, number, meeting, clean_env(), body, args))
        for rank in range(number)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return processes


def _train_and_die(last: int, *argv: str) -> None:
    from trainer import Trainer

    step = Trainer.train_step

    def step_and_die(trainer: Trainer) -> Any:
        if trainer.state.step == last:  # so that what came after the step before, such as a save, has begun
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(trainer)
        if trainer.state.step == last == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Trainer.train_step = step_and_die  # type: ignore[method-assign]
    train_main(*argv)
