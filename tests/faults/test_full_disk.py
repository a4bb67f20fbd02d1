"""If the disk is full, saves fail and the run continues: real runs on a real small disk."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.errors import UserError
from mingpt.snapshot import manager
from mingpt.snapshot.folder import SnapshotFolder, load_snapshot
from tests.faults.runs import Run, assert_same_run
from tests.helpers import (
    list_snapshots,
    loss_curve,
    newest_snapshot,
    run_args,
    run_captured,
    run_ranks,
    small_snapshot,
    train_run,
    write_overfitting_text,
    write_text,
)

LAST_STEP, SAVE_EVERY = 100, 10
DISK_SIZE = 8 * 2**20
KEPT = 2
OPTIONS = {
    "trainer__max_steps": LAST_STEP,
    "trainer__save_every": SAVE_EVERY,
    "trainer__eval_every": LAST_STEP,
    "trainer__keep_snapshots": 99,  # pruning would free space
    "trainer__save_overhead": None,  # so would these
}

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of DISK_SIZE bytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounts a disk: needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder next to its text.txt."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return train_run(folder / "run", write_text(folder / "text.txt"), **OPTIONS)


def saves(run: Run, failed: bool) -> list[dict[str, Any]]:
    return [row for row in run.rows("snapshot") if ("error" in row) == failed]


def file_names(run: Run) -> list[str]:
    """Returns the names of the saved snapshots according to metrics.jsonl."""
    return [f"step_{row['step']:08d}.pt" for row in saves(run, failed=False)]


@contextmanager
def paused_between_saves(run: Run) -> Iterator[None]:
    """Stops a run after its first save, while none is in progress."""
    run.wait((run.run_dir / f"snapshots/step_{SAVE_EVERY:08d}.pt").exists, "the first save")
    [process] = run.processes
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if list_snapshots(run.run_dir) == file_names(run):
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    yield
    process.send_signal(signal.SIGCONT)


def test_a_snapshot_that_does_not_fit_costs_no_other(disk: Path) -> None:
    """Although a scheduled one would fit in place of the newest one, which is not scheduled."""
    folder = SnapshotFolder(str(disk))
    weights = {"w": torch.zeros(DISK_SIZE // 14)}  # in two snapshots, 8/14 of the disk; a third one does not fit
    (disk / "others").write_bytes(bytes(DISK_SIZE // 4))
    folder.save_every = 1
    folder.keep = 2
    folder.write(small_snapshot(1, weights), flush=True)
    folder.write(small_snapshot(2, weights), flush=True)
    with pytest.raises(UserError, match=r"step_00000003\.pt can't be written: .*No space left on device"):
        folder.write(small_snapshot(3, weights), flush=True)
    assert list(folder.files()) == [1, 2]
    assert load_snapshot(folder.file(2))["step"] == 2
    (disk / "others").unlink()
    folder.write(small_snapshot(4, weights), flush=True)
    assert list(folder.files()) == [2, 4]


@pytest.mark.parametrize("ends_in_time", [False, True])
def test_a_run_continues_while_snapshots_cannot_be_written(
    ends_in_time: bool, disk: Path, run_dir: Path, undisturbed: Path, tmp_path: Path
) -> None:
    (disk / "snapshots").mkdir()
    (run_dir / "snapshots").symlink_to(disk / "snapshots")
    ballast = disk / "ballast"
    argv = run_args(run_dir, undisturbed.with_name("text.txt"), **OPTIONS)
    with Run(run_dir, argv) as run:
        run.start()
        with paused_between_saves(run), open(ballast, "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        if ends_in_time:
            run.wait(lambda: len(saves(run, failed=True)) > 1, "two failed saves")
            ballast.unlink()
        assert run.finish() == [0 if ends_in_time else 2]
    ballast.unlink(missing_ok=True)
    assert loss_curve(run_dir) == loss_curve(undisturbed)

    saved = [row["step"] for row in saves(run, failed=False)]
    failed = {row["step"]: row["error"] for row in saves(run, failed=True)}
    assert sorted([*saved, *failed]) == list(range(SAVE_EVERY, LAST_STEP + 1, SAVE_EVERY))
    assert saved[0] == SAVE_EVERY
    assert failed
    assert (max(failed) < LAST_STEP) == ends_in_time
    assert list_snapshots(run_dir) == file_names(run)
    assert newest_snapshot(run_dir)["step"] == max(saved)  # it is whole
    output = run.log.read_text()
    assert "Traceback" not in output
    for step, error in failed.items():
        assert f"step_{step:08d}.pt can't be written: " in error
        if step < LAST_STEP:
            assert f"warning: step {step}: {error}; training continues" in output
        else:
            assert f"error: not all snapshots could be saved: {error}" in output

    if not ends_in_time:
        [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
        assert (status, err) == (0, "")
    assert_same_run(undisturbed, run_dir)


@pytest.mark.parametrize(("num_snapshots", "is_enough"), [(KEPT + 3, True), (KEPT + 2, False)])
def test_a_disk_with_space_for_three_snapshots_more_than_are_kept_is_enough(
    num_snapshots: int, is_enough: bool, run_dir: Path, undisturbed: Path, disk: Path
) -> None:
    """They are the best one, the newest one, and the one that is being written."""
    size = max((undisturbed / "snapshots").glob("*.pt")).stat().st_size
    (disk / "others").write_bytes(bytes(DISK_SIZE - num_snapshots * size - size // 2))
    (disk / "snapshots").mkdir()
    (run_dir / "snapshots").symlink_to(disk / "snapshots")
    text = write_overfitting_text(run_dir.parent / "text.txt")
    options = OPTIONS | {"trainer__keep_snapshots": KEPT, "trainer__save_overhead": 0.9, "trainer__eval_every": 4}
    argv = run_args(run_dir, text, **options, optimizer__learning_rate=0.01)
    [(status, err)] = run_ranks(1, _train_with_many_saves, *argv, tmp_path=run_dir.parent)
    best, *kept = (int(file.stem.removeprefix("step_")) for file in sorted(disk.glob("snapshots/*.pt")))
    if is_enough:
        assert (status, err) == (0, "")
        assert kept == [LAST_STEP - SAVE_EVERY, LAST_STEP]
    else:
        assert status == 2
        assert "No space left on device" in err
    newest = SnapshotFolder(f"{disk}/snapshots").load_newest()
    assert newest is not None
    assert newest["best"]["step"] == best < SAVE_EVERY


def _train_with_many_saves(*argv: str) -> tuple[int, str]:
    manager.MIN_SECONDS = 0.0
    status, _, err = run_captured(*argv)
    return status, err
