"""A rank that hangs is named, and shows its line."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import model
import trainer
from mingpt.distributed.process_group import ANSWER_SECONDS, ERROR_SECONDS
from mingpt.snapshot.manager import SnapshotManager
from tests.helpers import ROOT, free_port, main_process, run_args, start_ranks, write_text
from trainer import Trainer

STRATEGIES: dict[str, dict[str, Any]] = {
    "tree": {"distributed__reduction": "tree"},
    "stages": {"distributed__pipeline_stages": 2, "trainer__batch_size": 8},
    "ddp": {},
}
TIMEOUT = 2  # distributed.timeout_seconds
STEPS = 12
DONE_SECONDS = 60  # limit for the end of a rank
# Place of the fault: a function that causes it when it is called.
PLACES: dict[str, tuple[Any, str]] = {
    "before a step": (Trainer, "train_step"),
    "in forward": (model, "attention"),
    "in a save": (SnapshotManager, "save"),
    "at the end": (trainer, "shared_errors"),
}


class Plan(NamedTuple):
    """A rank that hangs."""

    place: str
    strategy: str
    world_size: int
    rank: int
    step: int  # number of finished steps


def run_rank(plan: Plan, argv: list[str], folder: Path) -> None:
    """For `start_ranks`: runs main.py with stderr in a file. The rank in the plan causes the fault."""
    rank = int(os.environ["RANK"])
    if rank == plan.rank:
        replace_function(plan, folder / "fault")
    main_process(argv, os.devnull, folder / f"stderr-{rank}")


def replace_function(plan: Plan, file: Path) -> None:
    """Lets the function at the plan's place cause the fault once, and write the line of its caller to a file."""
    trainers: list[Trainer] = []
    train_step = Trainer.train_step

    def keep_trainer(self: Trainer) -> Any:
        trainers[:] = [self]
        return train_step(self)

    Trainer.train_step = keep_trainer  # type: ignore[method-assign]
    owner, name = PLACES[plan.place]
    function = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if trainers and trainers[0].progress.step == plan.step and not file.exists():
            caller = sys._getframe(1)
            file.write_text(f"{Path(caller.f_code.co_filename).relative_to(ROOT)}:{caller.f_lineno}")
            time.sleep(1000)
        return function(*args, **kwargs)

    setattr(owner, name, replaced)


def slow(*plan: Any) -> Any:
    return pytest.param(Plan(*plan), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "plan",
    [
        Plan("at the end", "tree", 2, 0, STEPS),
        slow("before a step", "ddp", 3, 2, 3),
        slow("in forward", "stages", 2, 0, 3),
        slow("in a save", "tree", 3, 1, 4),
    ],
)
def test_a_rank_for_which_the_others_wait_is_named_with_its_line(plan: Plan, tmp_path: Path) -> None:
    argv = run_args(
        tmp_path / "run",
        write_text(tmp_path / "text.txt"),
        trainer__max_steps=STEPS,
        trainer__save_every=4,
        distributed__timeout_seconds=TIMEOUT,
        distributed__init_method=f"tcp://localhost:{free_port()}",
        **STRATEGIES[plan.strategy],
    )
    processes, _ = start_ranks(plan.world_size, run_rank, plan, argv, tmp_path, tmp_path=tmp_path)
    others = [rank for rank in range(plan.world_size) if rank != plan.rank]
    for rank in others:
        processes[rank].join(DONE_SECONDS)
    statuses = [processes[rank].exitcode for rank in others]
    for process in processes:
        process.kill()
        process.join()
    files = [tmp_path / f"stderr-{rank}" for rank in others]
    stderrs = [re.sub(r"^[-\d]+ [:\d]+  ", "", file.read_text(), flags=re.MULTILINE) for file in files]  # no dates
    assert statuses == [1] * len(others), stderrs

    fault = tmp_path / "fault"
    for file, stderr in zip(files, stderrs, strict=True):
        message = f"error: rank {plan.rank}: dead, stopped, cut off or hanging"
        assert message in stderr or (plan.rank == 0 and "error: rank 0 has ended, or does not answer" in stderr), stderr
        assert file.stat().st_mtime - fault.stat().st_mtime < TIMEOUT + 2 * ERROR_SECONDS + ANSWER_SECONDS + 1
    name, line = fault.read_text().split(":")
    assert f'{name}", line {line} in ' in (tmp_path / f"stderr-{plan.rank}").read_text()  # of its stack
