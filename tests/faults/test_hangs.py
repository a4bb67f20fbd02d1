"""A rank that hangs is named, and shows its line."""

import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import model
import trainer
from mingpt.distributed.process_group import ANSWER_SECONDS, ERROR_SECONDS
from mingpt.snapshot.manager import SnapshotManager
from tests.helpers import ROOT, free_port, main_process, run_args, start_ranks, write_text
from tests.inside import call_before
from trainer import Trainer

STRATEGIES: dict[str, dict[str, Any]] = {
    "tree": {"distributed__reduction": "tree"},
    "stages": {"distributed__pipeline_stages": 2, "trainer__batch_size": 8},
    "ddp": {},
}
TIMEOUT = 2  # distributed.timeout_seconds
STEPS = 12
DONE_SECONDS = 60  # limit for the end of a rank
# Place of the fault: before a call of a function.
PLACES: dict[str, tuple[Any, str]] = {
    "before a step": (Trainer, "train_step"),
    "in forward": (model, "attention"),
    "in a save": (SnapshotManager, "save"),
    "at the end": (trainer, "shared_errors"),
}


def run_rank(place: str, hanging: int, step: int, argv: list[str], folder: Path) -> None:
    """For `start_ranks`: runs main.py with stderr in a file. The rank `hanging` hangs after this number of steps."""
    rank = int(os.environ["RANK"])
    if rank == hanging:
        trainers: list[Trainer] = []
        call_before(Trainer, "train_step", trainers.append)
        call_before(*PLACES[place], partial(hang, trainers, step, folder / "fault"))
    main_process(argv, os.devnull, folder / f"stderr-{rank}")


def hang(trainers: list[Trainer], step: int, file: Path, *_: Any, **options: Any) -> None:
    """Hangs once, at this step, and writes the line of the caller to a file."""
    if trainers and trainers[-1].progress.step == step and not file.exists():
        caller = sys._getframe(2)  # frame 1 belongs to `call_before`
        file.write_text(f"{Path(caller.f_code.co_filename).relative_to(ROOT)}:{caller.f_lineno}")
        time.sleep(1000)


def slow(*plan: Any) -> Any:
    return pytest.param(*plan, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("place", "strategy", "world_size", "hanging", "step"),
    [
        ("at the end", "tree", 2, 0, STEPS),
        slow("before a step", "ddp", 3, 2, 3),
        slow("in forward", "stages", 2, 0, 3),
        slow("in a save", "tree", 3, 1, 4),
    ],
)
def test_a_rank_for_which_the_others_wait_is_named_with_its_line(
    place: str, strategy: str, world_size: int, hanging: int, step: int, tmp_path: Path
) -> None:
    argv = run_args(
        tmp_path / "run",
        write_text(tmp_path / "text.txt"),
        trainer__max_steps=STEPS,
        trainer__save_every=4,
        distributed__timeout_seconds=TIMEOUT,
        distributed__init_method=f"tcp://localhost:{free_port()}",
        **STRATEGIES[strategy],
    )
    processes, _ = start_ranks(world_size, run_rank, place, hanging, step, argv, tmp_path, tmp_path=tmp_path)
    others = [rank for rank in range(world_size) if rank != hanging]
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
        message = f"error: rank {hanging}: dead, stopped, cut off or hanging"
        assert message in stderr or (hanging == 0 and "error: rank 0 has ended, or does not answer" in stderr), stderr
        assert file.stat().st_mtime - fault.stat().st_mtime < TIMEOUT + 2 * ERROR_SECONDS + ANSWER_SECONDS + 1
    name, line = fault.read_text().split(":")
    assert f'{name}", line {line} in ' in (tmp_path / f"stderr-{hanging}").read_text()  # of its stack
