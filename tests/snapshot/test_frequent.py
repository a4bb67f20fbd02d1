"""Frequent snapshots (trainer.save_overhead): when they are due, where they are, and how a killed run uses them."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from mingpt.errors import UserError
from mingpt.snapshot import interval
from mingpt.snapshot.interval import MIN_STEPS, SaveInterval
from mingpt.snapshot.load import load_pretrained
from mingpt.snapshot.storage import SnapshotStorage
from tests.faults.runs import Run, assert_same_run
from tests.helpers import (
    assert_equal_snapshots,
    list_snapshots,
    loss_curve,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    small_snapshot,
    train_main,
    write_text,
)

STEPS = 600
# main.py with a short interval.
OFTEN = """
import sys
import main
from mingpt.program import exit_process, run_program
from mingpt.snapshot import interval

interval.MIN_SECONDS = 0.1
exit_process(run_program(main.main, sys.argv[1:]))
"""
OPTIONS = {"trainer__max_steps": STEPS, "trainer__save_every": 10_000, "trainer__eval_every": 100}


class Clock:
    """time.monotonic as the test sets it."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(interval.time, "monotonic", lambda: clock.now)
    return clock


def seconds_until_due(saves: SaveInterval, clock: Clock) -> float:
    began = clock.now
    while not saves.is_due():
        clock.now += 0.01
        assert clock.now < began + 1000
    return clock.now - began


def measure_steps(saves: SaveInterval) -> None:
    for _ in range(MIN_STEPS):
        saves.add_step(0.1, is_writing=False)


def test_the_interval_is_the_cost_of_a_save_by_the_fraction_of_time(clock: Clock) -> None:
    saves = SaveInterval(0.02)
    measure_steps(saves)
    for _ in range(16):
        saves.add_save(0.03)
        saves.add_step(0.12, is_writing=True)
        saves.add_step(0.15, is_writing=False)
        saves.add_step(0.1, is_writing=False)
    # 0.03 s for the copy, and 0.07 s because two steps were longer
    assert seconds_until_due(saves, clock) == pytest.approx(0.1 / 0.02, abs=0.02)


def test_no_snapshot_is_due_before_steps_without_one_are_measured(clock: Clock) -> None:
    saves = SaveInterval(0.02)
    clock.now += 1000
    for _ in range(MIN_STEPS):
        assert not saves.is_due()
        saves.add_step(0.1, is_writing=False)
    assert saves.is_due()
    saves.add_save(0.001)
    clock.now += 1000
    saves.add_step(0.1, is_writing=True)
    assert not saves.is_due()  # the file is not yet written
    saves.add_step(0.1, is_writing=False)
    assert not saves.is_due()
    saves.add_step(0.1, is_writing=False)
    assert saves.is_due()


def test_files_are_told_apart_from_others_and_not_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    storage, frequent = SnapshotStorage(str(tmp_path), 3), SnapshotStorage(str(tmp_path), 2, is_frequent=True)
    for step in (1, 2, 3):
        frequent.write(small_snapshot(step), None)
    assert not flushed
    storage.write(small_snapshot(2), None)
    assert len(flushed) == 2  # the file and its folder
    assert (storage.steps(), frequent.steps()) == ([2], [2, 3])
    assert sorted(os.listdir(tmp_path)) == ["frequent_00000002.pt", "frequent_00000003.pt", "step_00000002.pt"]
    assert storage.load_newest()["step"] == 2
    assert storage.load_newest(first_step=3) is None
    frequent.remove(keep=1)
    assert frequent.steps() == [3]
    frequent.remove()
    assert os.listdir(tmp_path) == ["step_00000002.pt"]


# Real runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder next to its text.txt."""
    folder = tmp_path_factory.mktemp("undisturbed")
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__save_overhead=None, **OPTIONS)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    assert list_snapshots(folder / "run") == [f"step_{STEPS:08d}.pt"]
    return folder / "run"


@pytest.fixture(scope="module")
def killed_once(undisturbed: Path) -> Path:
    """The folder of the same run, killed after two frequent snapshots."""
    folder = undisturbed.with_name("killed")
    program = undisturbed.with_name("often.py")
    program.write_text(OFTEN)
    options = OPTIONS | {"trainer__save_overhead": 0.9}  # also on a machine where saves take long
    with Run(folder, run_args(folder, undisturbed.with_name("text.txt"), **options), program) as run:
        run.start()
        run.wait(lambda: len(frequent_files(run)) == 2, "two frequent snapshots")
        os.kill(run.processes[0].pid, signal.SIGKILL)
        run.finish()
    return folder


@pytest.fixture
def killed(killed_once: Path, tmp_path: Path) -> Run:
    """A copy of it."""
    folder = shutil.copytree(killed_once, tmp_path / "run")
    return Run(folder, run_args(folder, killed_once.with_name("text.txt"), **OPTIONS))


def frequent_files(run: Run) -> list[Path]:
    return sorted((run.run_dir / "snapshots").glob("frequent_*.pt"))


def resume(run: Run) -> str:
    """Returns stdout and stderr."""
    [(status, out, err)] = run_ranks(1, run_captured, *run.argv, tmp_path=run.run_dir.parent)
    assert status == 0, err
    assert list_snapshots(run.run_dir) == [f"step_{STEPS:08d}.pt"], "a frequent one is left"
    return out + err


def test_a_killed_run_resumes_from_the_newest_and_leaves_none(killed: Run, undisturbed: Path) -> None:
    newest = frequent_files(killed)[-1]
    assert f"resuming from {newest}\n" in resume(killed)
    assert_same_run(undisturbed, killed.run_dir)


def test_a_run_whose_snapshots_are_all_damaged_frequent_ones_begins_again(killed: Run, undisturbed: Path) -> None:
    for file in frequent_files(killed):
        file.write_bytes(b"")
    out = resume(killed)
    assert out.count(" is damaged (") == 2
    assert "resuming" not in out
    assert_same_run(undisturbed, killed.run_dir)


def test_a_run_that_is_ended_at_a_frequent_one_keeps_it(killed: Run) -> None:
    newest = frequent_files(killed)[-1]
    argv = [*killed.argv, "--trainer.max_steps", "1"]
    [(status, out, _)] = run_ranks(1, run_captured, *argv, tmp_path=killed.run_dir.parent)
    assert status == 0
    step = int(newest.stem[-8:])
    assert f"already trained: {newest} is at step {step}" in out
    assert newest in frequent_files(killed)
    assert load_pretrained(str(killed.run_dir), "--snapshot").snapshot["step"] == step  # since there is no other


@pytest.mark.parametrize("snapshot_path", [None, "elsewhere", "memory://snapshots"])
def test_they_are_in_a_local_folder_and_never_the_best_one(
    snapshot_path: str | None, text: Path, tmp_path: Path
) -> None:
    local_folder = f"{tmp_path}/run/snapshots"
    if snapshot_path == "elsewhere":
        snapshot_path = local_folder = f"{tmp_path}/elsewhere"
    options = {"trainer__save_every": 40, "trainer__eval_every": 1, "trainer__max_steps": 80}
    options |= {"trainer__snapshot_path": snapshot_path, "trainer__save_overhead": 0.9}
    [(status, written)] = run_ranks(
        1, _train_with_many, *run_args(tmp_path / "run", text, **options), tmp_path=tmp_path
    )
    assert status == 0
    folder = snapshot_path or local_folder
    kept = [(path, best) for path, best in written if "step_" in path]
    assert [path for path, _ in kept] == [f"{folder}/step_00000040.pt", f"{folder}/step_00000080.pt"]
    frequent = [(path, best) for path, best in written if "frequent_" in path]
    assert len(frequent) > 3
    assert all(path.startswith(f"{local_folder}/frequent_") for path, _ in frequent)
    assert {best for _, best in frequent} <= {None, 40}
    assert [row["step"] for row in read_rows(tmp_path / "run", "snapshot")] == [40, 80]
    assert not list(Path(local_folder).glob("frequent_*"))


def _train_with_many(*argv: str) -> tuple[int, list[tuple[str, int | None]]]:
    interval.MIN_SECONDS = 0.0
    written = []
    write = SnapshotStorage.write

    def observed_write(storage: SnapshotStorage, snapshot: dict[str, Any], best_step: int | None) -> None:
        written.append((storage.file(snapshot["step"]), best_step))
        write(storage, snapshot, best_step)

    SnapshotStorage.write = observed_write  # type: ignore[method-assign]
    return train_main(*argv), written


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_machines_that_share_no_folder_each_have_them(strategy: str, text: Path, tmp_path: Path) -> None:
    options = {"trainer__save_every": 1000, "trainer__max_steps": 40, "trainer__save_overhead": 0.9}
    argv = run_args(tmp_path / "RANK", text, distributed__strategy=strategy, **options)
    assert run_ranks(2, _end_before_the_last_step, *argv, tmp_path=tmp_path) == [2, 2]
    steps = [SnapshotStorage(f"{tmp_path}/rank{rank}/snapshots", 2, is_frequent=True).steps() for rank in (0, 1)]
    assert steps[0] == steps[1] != []
    shutil.rmtree(tmp_path / "rank0")  # that machine is lost
    assert run_ranks(2, _train_on_machine, *argv, tmp_path=tmp_path) == [0, 0]
    assert_equal_snapshots(tmp_path / "rank0", tmp_path / "rank1")
    assert min(step for step, _ in loss_curve(tmp_path / "rank0")) == steps[0][-1] + 1


def _train_on_machine(*argv: str) -> int:
    interval.MIN_SECONDS = 0.0
    os.environ["LOCAL_RANK"] = "0"
    return train_main(*(word.replace("RANK", f"rank{os.environ['RANK']}") for word in argv))


def _end_before_the_last_step(*argv: str) -> int:
    from trainer import Trainer

    train_step = Trainer.train_step

    def failing_step(trainer: Trainer) -> Any:
        if trainer.progress.step == 39:
            trainer.snapshots.wait_for_saves()
            raise UserError("the end")
        return train_step(trainer)

    Trainer.train_step = failing_step  # type: ignore[method-assign]
    return _train_on_machine(*argv)
