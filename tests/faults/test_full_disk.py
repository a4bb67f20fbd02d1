"""A full disk, or a folder that can't be written, costs saves and not the run: real runs on a real small disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers import (
    assert_equal_snapshots,
    loss_curve,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_main,
    train_main,
    write_text,
)

from mingpt.snapshot.storage import SnapshotStorage

LAST_STEP, SAVE_EVERY = 100, 10
OPTIONS = {
    "trainer__max_steps": LAST_STEP,
    "trainer__save_every": SAVE_EVERY,
    "trainer__eval_every": LAST_STEP,
    "trainer__keep_snapshots": 99,  # pruning would make room
}

pytestmark = pytest.mark.slow


class Disk:
    """A disk for snapshots that can be filled while a run writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, process: subprocess.Popen) -> None:
        with open(self.path / "ballast", "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def make_room(self, process: subprocess.Popen) -> None:
        os.unlink(self.path / "ballast")


class FileSizeLimit(Disk):
    """In place of a disk where none can be mounted: files of the run can't grow."""

    def fill(self, process: subprocess.Popen) -> None:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    def make_room(self, process: subprocess.Popen) -> None:
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A tmpfs of 8 MiB where one can be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield FileSizeLimit(path)
        return
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and run/."""
    folder = tmp_path_factory.mktemp("undisturbed")
    text = write_text(folder / "text.txt")
    assert run_ranks(1, train_main, *run_args(folder / "run", text, **OPTIONS), tmp_path=folder) == [0]
    return folder


def save_steps(run_dir: Path, failed: bool) -> list[int]:
    return [row["step"] for row in read_rows(run_dir, "snapshot") if ("error" in row) == failed]


def wait_until(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def paused_between_saves(process: subprocess.Popen, run_dir: Path, snapshots: Path) -> Iterator[None]:
    """Stops a run after its first save, while none is in progress."""
    wait_until(process, (snapshots / f"step_{SAVE_EVERY:08d}.pt").exists)
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if sorted(os.listdir(snapshots)) == [f"step_{step:08d}.pt" for step in save_steps(run_dir, failed=False)]:
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    yield
    process.send_signal(signal.SIGCONT)


def check_failed_saves(run_dir: Path, snapshots: Path, undisturbed: Path, err: str) -> list[int]:
    """All steps are trained, failures are logged and recorded, and snapshots are whole; returns steps of failures."""
    assert loss_curve(run_dir) == loss_curve(undisturbed / "run")
    saved, failed = save_steps(run_dir, failed=False), save_steps(run_dir, failed=True)
    assert sorted(saved + failed) == list(range(SAVE_EVERY, LAST_STEP + 1, SAVE_EVERY))
    assert saved[0] == SAVE_EVERY
    assert failed
    assert "Traceback" not in err
    errors = [row["error"] for row in read_rows(run_dir, "snapshot") if "error" in row]
    for step, error in zip(failed, errors, strict=True):
        assert error.startswith("trainer.snapshot_path: ")
        assert f"step_{step:08d}.pt can't be written: " in error
        assert f"warning: step {step}: {error}; training continues" in err
    storage, messages = SnapshotStorage(str(snapshots), keep=99), []
    newest = storage.load_newest(messages.append)
    assert newest is not None
    assert (newest["step"], messages) == (max(saved), [])
    assert sorted(os.listdir(snapshots)) == [f"step_{step:08d}.pt" for step in saved]
    return failed


@pytest.mark.parametrize("room_again", [False, True])
def test_a_run_continues_while_the_disk_is_full(
    room_again: bool, disk: Disk, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir, snapshots = tmp_path / "run", disk.path / "snapshots"
    run_dir.mkdir()
    snapshots.mkdir()
    (run_dir / "snapshots").symlink_to(snapshots)
    argv = run_args(run_dir, undisturbed / "text.txt", **OPTIONS)
    with start_main(argv) as process:
        with paused_between_saves(process, run_dir, snapshots):
            disk.fill(process)
        if room_again:
            wait_until(process, lambda: len(save_steps(run_dir, failed=True)) > 1)
            disk.make_room(process)
        _, err = process.communicate(timeout=120)
    failed = check_failed_saves(run_dir, snapshots, undisturbed, err)
    assert (failed[-1] < LAST_STEP) == room_again
    assert process.returncode == (0 if room_again else 2)
    if not room_again:
        disk.make_room(process)
        [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
        assert (status, err) == (0, "")
    assert_equal_snapshots(run_dir, undisturbed / "run")
    assert loss_curve(run_dir) == loss_curve(undisturbed / "run")


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_run_continues_while_its_snapshot_folder_cannot_be_written(
    is_restored: bool, undisturbed: Path, tmp_path: Path
) -> None:
    """The folder is replaced by a file: root can write to folders whatever their modes are."""
    run_dir, snapshots, moved = tmp_path / "run", tmp_path / "run/snapshots", tmp_path / "moved"
    with start_main(run_args(run_dir, undisturbed / "text.txt", **OPTIONS)) as process:
        with paused_between_saves(process, run_dir, snapshots):
            snapshots.rename(moved)
            snapshots.write_text("not a folder")
        wait_until(process, lambda: len(save_steps(run_dir, failed=True)) > 1)
        if is_restored:
            snapshots.unlink()
            moved.rename(snapshots)
        _, err = process.communicate(timeout=120)
    assert process.returncode == (0 if is_restored else 2)
    failed = check_failed_saves(run_dir, snapshots if is_restored else moved, undisturbed, err)
    assert (failed[-1] < LAST_STEP) == is_restored
    if not is_restored:
        assert snapshots.read_text() == "not a folder"
