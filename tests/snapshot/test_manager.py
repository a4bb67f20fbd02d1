"""How a run's state comes back: the copy aside, who keeps snapshots, and which one is taken."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_equal_snapshots,
    loss_curve,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    train_main,
)
from mingpt.snapshot.async_writer import AsyncSnapshotWriter
from state import TrainingState, check_fits

from mingpt.config import Config, config_to_dict
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext
from mingpt.snapshot.storage import SnapshotStorage, load_snapshot
from mingpt.utils.errors import UserError

# Written in the background


def header(step: int) -> dict[str, Any]:
    return {"step": step, "val_loss": None, "best": {"step": None}}


class SlowFolder(SnapshotStorage):
    """Waits to be allowed before it writes."""

    def __init__(self, path: str) -> None:
        super().__init__(path, keep=3)
        self.allowed = threading.Event()

    def write(self, snapshot: dict[str, Any], best_step: int | None) -> str:
        assert self.allowed.wait(20)
        return super().write(snapshot, best_step)


def test_what_is_written_is_the_state_of_its_step(tmp_path: Path) -> None:
    folder = SlowFolder(str(tmp_path))
    writer, weight = AsyncSnapshotWriter(folder), torch.ones(1000)
    for step in (1, 2):  # the second time into the same buffers
        writer.save(header(step), [("weight", weight, {})])
        weight += 1  # the next step moves weights while the file is yet to be written
        assert not writer.wait(0.05)
        folder.allowed.set()
        assert writer.wait(20)
        folder.allowed.clear()
        assert torch.equal(load_snapshot(folder.file(step))["model"]["weight"], torch.full((1000,), float(step)))
    assert [(written.step, written.error) for written in writer.poll()] == [(1, None), (2, None)]
    assert writer.poll() == []


def test_buffers_are_used_again(tmp_path: Path) -> None:
    writer, weight = AsyncSnapshotWriter(SnapshotStorage(str(tmp_path), keep=3)), torch.ones(1000)
    addresses = set()
    for step in (1, 2):
        writer.save(header(step), [("weight", weight, {})])
        assert writer.wait(20)
        addresses |= {aside.data_ptr() for aside in writer.staging_buffers.values()}
    assert len(addresses) == 1


def test_why_a_snapshot_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = AsyncSnapshotWriter(SnapshotStorage(str(tmp_path / "file"), keep=3))
    writer.save(header(1), [("weight", torch.ones(1), {})])
    assert writer.wait(20)
    [written] = writer.poll()
    assert written.step == 1
    assert isinstance(written.error, UserError)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_save_that_the_one_before_holds_up_is_left_out_and_said(strategy: str, text: Path, tmp_path: Path) -> None:
    """The disk is stuck for longer than ranks may wait; the last save waits and is made."""
    knobs = {"distributed__timeout_seconds": 2, "trainer__save_every": 5, "distributed__strategy": strategy}
    argv = run_args(tmp_path / "run", text, **knobs)
    (status, _, err), *_ = run_ranks(2, _stuck_once, *argv, tmp_path=tmp_path)
    assert status == 0
    assert "step 10: " in err
    assert "still being written" in err
    assert newest_snapshot(tmp_path / "run")["step"] == 12
    errors = {row["step"]: row.get("error") for row in read_rows(tmp_path / "run", "snapshot")}
    assert {step for step, error in errors.items() if error} == {10}
    assert sorted(errors) == [5, 10, 12]


def _stuck_once(*argv: str) -> tuple[int, str, str]:
    write = SnapshotStorage.write

    def stuck(folder: SnapshotStorage, snapshot: dict[str, Any], best_step: int | None) -> str:
        time.sleep(3 if snapshot["step"] == 5 else 0)
        return write(folder, snapshot, best_step)

    SnapshotStorage.write = stuck  # type: ignore[method-assign]
    return run_captured(*argv)


def test_a_best_that_was_not_written_does_not_cost_the_older_best(text: Path, tmp_path: Path) -> None:
    """Evaluations at 4 and 8, the second one better; the save of step 8 fails."""
    knobs = {"trainer__save_every": 1, "trainer__keep_snapshots": 1, "trainer__max_steps": 10}
    [best_steps] = run_ranks(1, _fails_at_8, *run_args(tmp_path / "run", text, **knobs), tmp_path=tmp_path)
    assert best_steps == {1: None, 2: None, 3: None, 4: 4, 5: 4, 6: 4, 7: 4, 8: 8, 9: 4, 10: 10}


def _fails_at_8(*argv: str) -> dict[int, int | None]:
    write, best_steps = SnapshotStorage.write, {}

    def failing(folder: SnapshotStorage, snapshot: dict[str, Any], best_step: int | None) -> str:
        best_steps[snapshot["step"]] = best_step
        if snapshot["step"] == 8:
            raise UserError("no room")
        return write(folder, snapshot, best_step)

    SnapshotStorage.write = failing  # type: ignore[method-assign]
    assert train_main(*argv) == 0  # the last save was made
    return best_steps


@pytest.mark.slow
def test_snapshots_by_the_clock(text: Path, tmp_path: Path) -> None:
    knobs = {"trainer__save_every": 100_000, "trainer__save_minutes": 0.01, "trainer__max_steps": 300}
    assert run_ranks(2, _with_slow_steps, *run_args(tmp_path / "run", text, **knobs), tmp_path=tmp_path) == [0, 0]
    saved = read_rows(tmp_path / "run", "snapshot")
    assert len(saved) > 3
    gaps = [late["time"] - early["time"] for early, late in itertools.pairwise(saved[:-1])]
    assert all(0.4 < gap < 2 for gap in gaps), gaps


def _with_slow_steps(*argv: str) -> int:
    from trainer import Trainer

    step = Trainer.train_step

    def slowly(trainer: Trainer) -> Any:
        time.sleep(0.01)
        return step(trainer)

    Trainer.train_step = slowly  # type: ignore[method-assign]
    return train_main(*argv)


# What does not go together


@pytest.mark.parametrize(
    ("knobs", "kept", "said"),
    [
        ({}, None, r"trainer\.deterministic is false, must be true with distributed\.reduction tree on GPUs"),
        ({"trainer__deterministic": "true", "trainer__precision": "auto"}, "fp16", "fp16, kept from the snapshot"),
    ],
)
def test_what_the_tree_cannot_do_on_a_gpu(knobs: dict, kept: str | None, said: str, tmp_path: Path) -> None:
    state = TrainingState.__new__(TrainingState)  # before it needs the GPU
    state.config = read_config(run_args(tmp_path, "text.txt", distributed__reduction="tree", **knobs))
    state.context = DistributedContext(RankInfo())
    state.context.device = torch.device("cuda")
    threads = torch.get_num_threads()
    with pytest.raises(UserError, match=said):
        state._choose({"precision": kept} if kept else {})
    torch.set_num_threads(threads)


# Found anywhere


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt, a whole run of 12 steps, and one/ and other/: six steps on two machines, each its own."""
    from helpers import write_text

    folder = tmp_path_factory.mktemp("apart")
    text = write_text(folder / "text.txt")
    knobs = {"optimizer__decay_steps": 12}
    assert run_ranks(2, train_main, *run_args(folder / "whole", text, **knobs), tmp_path=folder) == [0, 0]
    argv = run_args(folder / "RANK", text, trainer__max_steps=6, **knobs)
    assert run_ranks(2, machines, *argv, tmp_path=folder) == [(0, "")] * 2
    return folder


def machines(*argv: str) -> tuple[int, str]:
    """A rank on a machine of its own, with its own run folder in place of RANK; returns status and what it says."""
    os.environ["LOCAL_RANK"] = "0"
    mine = ("one", "other")[int(os.environ["RANK"])]
    status, _, err = run_captured(*(word.replace("RANK", mine) for word in argv))
    return status, err


def test_machines_that_share_no_folder_keep_one_snapshot_each(apart: Path) -> None:
    for name in ("one", "other"):
        assert SnapshotStorage(str(apart / name / "snapshots"), keep=3).steps() == [3, 6]
    assert_equal_snapshots(apart / "one", apart / "other")


@pytest.mark.parametrize(
    "trouble", ["none", "first is new", "first has an older one", "first is damaged", "other is new"]
)
def test_the_newest_is_taken_wherever_it_is(trouble: str, apart: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        shutil.copytree(apart / name, tmp_path / name)
    if trouble == "first is new":
        shutil.rmtree(tmp_path / "one")
    elif trouble == "other is new":
        shutil.rmtree(tmp_path / "other")
    elif trouble == "first has an older one":
        (tmp_path / "one/snapshots/step_00000006.pt").unlink()
    elif trouble == "first is damaged":
        for file in (tmp_path / "one/snapshots").iterdir():
            file.write_bytes(file.read_bytes()[:-1])
    knobs = {"trainer__save_every": 20, "optimizer__decay_steps": 12}
    argv = run_args(tmp_path / "RANK", apart / "text.txt", **knobs, distributed__strategy="zero1")
    assert run_ranks(2, machines, *argv, tmp_path=tmp_path) == [(0, "")] * 2
    for name in ("one", "other"):
        assert_equal_snapshots(tmp_path / name, apart / "whole")
        # Each machine has the one that was elected, whether it made or got it, so that the other's loss costs nothing.
        assert load_snapshot(str(tmp_path / name / "snapshots/step_00000006.pt"))["step"] == 6
    assert loss_curve(tmp_path / "one")[-6:] == loss_curve(apart / "whole")[-6:]


def test_where_no_machine_has_a_whole_one_nothing_is_started_anew(apart: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "snapshots").mkdir(parents=True)
    (tmp_path / "other/snapshots/step_00000006.pt").write_bytes(b"torn")
    argv = run_args(tmp_path / "RANK", apart / "text.txt")
    (first, err), (second, _) = run_ranks(2, machines, *argv, tmp_path=tmp_path)
    assert (first, second) == (2, 2)
    assert "rank 1" in err
    assert "all 1 snapshots" in err


def test_ranks_that_share_a_folder_keep_one_snapshot_together(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1)
    assert run_ranks(2, machines, *argv, tmp_path=tmp_path) == [(0, "")] * 2
    assert [path.name for path in (tmp_path / "run/snapshots").iterdir()] == ["step_00000001.pt"]


def test_a_snapshot_that_names_no_optimizer_is_adamws() -> None:
    """It is from before there was a choice."""
    config = config_to_dict(Config())
    older = {"step": 3, "vocabulary": "ab", "config": config_to_dict(Config())}
    del older["config"]["optimizer"]["name"]
    config["optimizer"]["name"] = "adamw"
    check_fits(older, config, "ab")
    config["optimizer"]["name"] = "muon"
    with pytest.raises(UserError, match=r"optimizer\.name is muon, but adamw in the snapshot of step 3"):
        check_fits(older, config, "ab")


def test_state_of_one_optimizer_is_not_taken_for_the_others(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=3)
    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    argv += ["--trainer.max_steps", "6", "--optimizer.name", "muon"]
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert "optimizer.name is muon, but adamw in the snapshot of step 3" in err
