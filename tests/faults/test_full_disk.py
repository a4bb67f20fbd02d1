"""A disk that is full, or a folder that is gone, costs saves and not the run: real runs on a real small disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import loss_curve, read_rows, run_args, run_program, run_ranks, start_main, train_main, write_text

from mingpt.snapshot.storage import SnapshotStorage

LAST = 100
EVERY = 10  # steps between saves
# Nothing is pruned, so that a full disk stays full.
KNOBS = {"trainer__max_steps": LAST, "trainer__save_every": EVERY, "trainer__keep_snapshots": 99}
KNOBS["trainer__eval_every"] = LAST

pytestmark = pytest.mark.slow


class Disk:
    """A disk for snapshots that can be filled and emptied while a run writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, process: subprocess.Popen) -> None:
        """Leaves no room for one more snapshot."""
        with open(self.path / "ballast", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return
        raise AssertionError("a disk without end")

    def empty(self, process: subprocess.Popen) -> None:
        """Makes room again."""
        os.unlink(self.path / "ballast")


class Limit(Disk):
    """Stands for a disk where none can be mounted: the system refuses to let a file of the run grow."""

    def fill(self, process: subprocess.Popen) -> None:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    def empty(self, process: subprocess.Popen) -> None:
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A tmpfs of 8 MiB, unless a test asks for a limit or the machine lets us mount none."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    limited = getattr(request, "param", "mounted") == "limited"
    if limited or os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield Limit(place)
        return
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and run/, which nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    text = write_text(folder / "text.txt")
    assert run_ranks(1, train_main, *run_args(folder / "run", text, **KNOBS), tmp_path=folder) == [0]
    return folder


def saves(run_dir: Path) -> tuple[list[int], list[int]]:
    """Steps at which a save succeeded, and at which one failed."""
    made = read_rows(run_dir, "snapshot")
    return [row["step"] for row in made if "error" not in row], [row["step"] for row in made if "error" in row]


def wait_for(process: subprocess.Popen, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def paused_between_saves(process: subprocess.Popen, run_dir: Path, snapshots: Path) -> Iterator[None]:
    """Halts a run at a moment at which its first save is over and none is under way: files and rows agree."""
    wait_for(process, (snapshots / f"step_{EVERY:08d}.pt").exists)
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if sorted(os.listdir(snapshots)) == [f"step_{step:08d}.pt" for step in saves(run_dir)[0]]:
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    yield
    process.send_signal(signal.SIGCONT)


def assert_went_on(run_dir: Path, snapshots: Path, calm: Path, err: str) -> list[int]:
    """Whatever failed: all steps were trained, each failure was said and recorded, and what was saved is whole."""
    assert loss_curve(run_dir) == loss_curve(calm / "run")
    good, failed = saves(run_dir)
    assert sorted(good + failed) == list(range(EVERY, LAST + 1, EVERY))
    assert good[0] == EVERY
    assert failed
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    recorded = [row["error"] for row in read_rows(run_dir, "snapshot") if "error" in row]
    for step, error in zip(failed, recorded, strict=True):
        assert "trainer.snapshot_path" in error
        assert any(error in line and f"step_{step:08d}.pt" in line for line in said), err
    folder = SnapshotStorage(str(snapshots), keep=99)
    complaints: list[str] = []
    newest = folder.newest(complaints.append)
    assert newest is not None
    assert (newest["step"], complaints) == (max(good), [])
    assert folder.steps() == good
    assert [name for name in os.listdir(snapshots) if name.endswith(".tmp")] == []
    return failed


def assert_ends_like(calm: Path, run_dir: Path, snapshots: Path) -> None:
    one, other = (SnapshotStorage(str(folder), keep=99).newest(print) for folder in (calm / "run/snapshots", snapshots))
    assert one is not None
    assert other is not None
    assert one["step"] == other["step"] == LAST
    for name, weight in one["model"].items():
        assert weight.equal(other["model"][name]), name
    assert loss_curve(run_dir) == loss_curve(calm / "run")


@pytest.mark.parametrize("disk", ["mounted", "limited"], indirect=True)
def test_a_disk_that_stays_full_does_not_end_the_run(disk: Disk, calm: Path, tmp_path: Path) -> None:
    run, snapshots = tmp_path / "run", disk.path / "snapshots"
    argv = run_args(run, calm / "text.txt", **KNOBS, trainer__snapshot_path=snapshots)
    with start_main(argv) as process:
        with paused_between_saves(process, run, snapshots):
            disk.fill(process)
        _, err = process.communicate(timeout=120)
    failed = assert_went_on(run, snapshots, calm, err)
    assert failed[-1] == LAST
    assert process.returncode == 2

    disk.empty(process)
    again = run_program("main.py", *argv)
    assert (again.returncode, again.stderr) == (0, "")
    assert_ends_like(calm, run, snapshots)


def test_a_disk_with_room_again_ends_the_run_well(disk: Disk, calm: Path, tmp_path: Path) -> None:
    run, snapshots = tmp_path / "run", disk.path / "snapshots"
    with start_main(run_args(run, calm / "text.txt", **KNOBS, trainer__snapshot_path=snapshots)) as process:
        with paused_between_saves(process, run, snapshots):
            disk.fill(process)
        wait_for(process, lambda: len(saves(run)[1]) > 1)
        disk.empty(process)
        _, err = process.communicate(timeout=120)
    failed = assert_went_on(run, snapshots, calm, err)
    assert failed[-1] < LAST
    assert process.returncode == 0
    assert_ends_like(calm, run, snapshots)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_folder_that_becomes_unwritable_does_not_end_the_run(comes_back: bool, calm: Path, tmp_path: Path) -> None:
    """A file in its place: modes do not stop root."""
    run, snapshots, aside = tmp_path / "run", tmp_path / "run/snapshots", tmp_path / "aside"
    with start_main(run_args(run, calm / "text.txt", **KNOBS)) as process:
        with paused_between_saves(process, run, snapshots):
            snapshots.rename(aside)
            snapshots.write_text("in the way")
        wait_for(process, lambda: len(saves(run)[1]) > 1)
        if comes_back:
            snapshots.unlink()
            aside.rename(snapshots)
        _, err = process.communicate(timeout=120)
    assert process.returncode == (0 if comes_back else 2)
    failed = assert_went_on(run, snapshots if comes_back else aside, calm, err)
    assert (failed[-1] < LAST) == comes_back
    if not comes_back:
        assert snapshots.read_text() == "in the way"
