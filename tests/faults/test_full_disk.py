"""A full disk, or a folder that can't be written, costs saves and not the run: real runs on a real small disk."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    assert_equal_snapshots,
    list_snapshots,
    loss_curve,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_main,
    train_main,
    wait_until,
    write_text,
)

LAST_STEP, SAVE_EVERY = 100, 10
OPTIONS = {
    "trainer__max_steps": LAST_STEP,
    "trainer__save_every": SAVE_EVERY,
    "trainer__eval_every": LAST_STEP,
    "trainer__keep_snapshots": 99,  # pruning would make room
}

pytestmark = pytest.mark.slow


class FullDisk:
    """A small disk for snapshots that can be filled while a run writes to it."""

    def __init__(self, run_dir: Path, disk: Path) -> None:
        self.ballast = disk / "ballast"
        (disk / "snapshots").mkdir()
        (run_dir / "snapshots").symlink_to(disk / "snapshots")

    def start(self, process: subprocess.Popen) -> None:
        with open(self.ballast, "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def end(self, process: subprocess.Popen) -> None:
        self.ballast.unlink()


class FileSizeLimit:
    """In place of a full disk where none can be mounted: files of the run can't grow."""

    def start(self, process: subprocess.Popen) -> None:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    def end(self, process: subprocess.Popen) -> None:
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class ReplacedFolder:
    """The folder of snapshots is replaced by a file: root can write to folders whatever their modes are."""

    def __init__(self, run_dir: Path) -> None:
        self.folder, self.moved = run_dir / "snapshots", run_dir / "moved"

    def start(self, process: subprocess.Popen) -> None:
        self.folder.rename(self.moved)
        self.folder.write_text("not a folder")

    def end(self, process: subprocess.Popen) -> None:
        assert self.folder.read_text() == "not a folder"
        self.folder.unlink()
        self.moved.rename(self.folder)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture(params=["full disk", "replaced folder"])
def fault(request: pytest.FixtureRequest, run_dir: Path, tmp_path: Path) -> Iterator[Any]:
    """What prevents saves of the run in run_dir from `start` to `end`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if request.param == "replaced folder":
        yield ReplacedFolder(run_dir)
    elif os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield FileSizeLimit()
    else:
        try:
            yield FullDisk(run_dir, disk)
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and run/."""
    folder = tmp_path_factory.mktemp("undisturbed")
    text = write_text(folder / "text.txt")
    assert run_ranks(1, train_main, *run_args(folder / "run", text, **OPTIONS), tmp_path=folder) == [0]
    return folder


def save_steps(run_dir: Path, failed: bool) -> list[int]:
    return [row["step"] for row in read_rows(run_dir, "snapshot") if ("error" in row) == failed]


def file_names(steps: list[int]) -> list[str]:
    return [f"step_{step:08d}.pt" for step in steps]


@contextmanager
def paused_between_saves(process: subprocess.Popen, run_dir: Path) -> Iterator[None]:
    """Stops a run after its first save, while none is in progress."""
    wait_until((run_dir / f"snapshots/step_{SAVE_EVERY:08d}.pt").exists, "the first save", process=process)
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if list_snapshots(run_dir) == file_names(save_steps(run_dir, failed=False)):
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    yield
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("ends_in_time", [False, True])
def test_a_run_continues_while_snapshots_cannot_be_written(
    ends_in_time: bool, fault: Any, run_dir: Path, undisturbed: Path, tmp_path: Path
) -> None:
    argv = run_args(run_dir, undisturbed / "text.txt", **OPTIONS)
    with start_main(argv) as process:
        with paused_between_saves(process, run_dir):
            fault.start(process)
        if ends_in_time:
            wait_until(lambda: len(save_steps(run_dir, failed=True)) > 1, "two failed saves", process=process)
            fault.end(process)
        _, err = process.communicate(timeout=120)
    assert process.returncode == (0 if ends_in_time else 2)
    if not ends_in_time:
        fault.end(process)
    assert loss_curve(run_dir) == loss_curve(undisturbed / "run")

    saved, failed = save_steps(run_dir, failed=False), save_steps(run_dir, failed=True)
    assert sorted(saved + failed) == list(range(SAVE_EVERY, LAST_STEP + 1, SAVE_EVERY))
    assert saved[0] == SAVE_EVERY
    assert failed
    assert (failed[-1] < LAST_STEP) == ends_in_time
    assert list_snapshots(run_dir) == file_names(saved)
    assert newest_snapshot(run_dir)["step"] == max(saved)  # it is whole
    assert "Traceback" not in err
    errors = [row["error"] for row in read_rows(run_dir, "snapshot") if "error" in row]
    for step, error in zip(failed, errors, strict=True):
        assert error.startswith("trainer.snapshot_path: ")
        assert f"step_{step:08d}.pt can't be written: " in error
        assert f"warning: step {step}: {error}; training continues" in err

    if not ends_in_time:
        [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
        assert (status, err) == (0, "")
    assert_equal_snapshots(run_dir, undisturbed / "run")
    assert loss_curve(run_dir) == loss_curve(undisturbed / "run")
