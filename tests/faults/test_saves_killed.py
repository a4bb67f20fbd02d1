"""A save that SIGKILL or a loss of power interrupts at any system call leaves a whole snapshot and no torn one."""

import builtins
import io
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.snapshot.folder import SnapshotFolder
from tests.helpers import run_ranks
from tests.inside import small_snapshot

LEFTOVER = f"step_00000001.pt.{'77' * 16}.tmp"  # of an earlier killed save, which the next start deletes


def save(folder: Path, step: int, flush: bool) -> None:
    """Saves a snapshot that is larger than a file's buffer, so that it takes several writes, as a run does."""
    weights = {name: torch.full((5000,), float(step)) for name in ("a", "b", "c")}
    SnapshotFolder(str(folder), save_every=3 if flush else 99).write(small_snapshot(step, weights), flush)


class CrashingSystem:
    """Records the calls that change a folder, and kills the process at one of them.

    Args:
        folder: calls for other folders are ignored
        crash_at: number of the call; None: no crash
        moment: `before` the call, `after` it, `half` way through a write, or after it by a loss of `power`, which also
            discards what was not synced: contents of files, and renames in the folder. Deletions are kept, which is the
            worst case.
    """

    def __init__(self, folder: str, crash_at: int | None, moment: str) -> None:
        self.folder, self.crash_at, self.moment = folder, crash_at, moment
        self.calls: list[str] = []
        self.synced_sizes: dict[int, int] = {}  # by inode, of files with writes that are not synced
        self.renames: list[tuple[str, str]] = []  # not synced
        self.rename, self.fsync = os.rename, os.fsync
        self.intercept(builtins, "open", "open", self.open_file)
        self.intercept(os, "open", "open folder", os.open)
        self.intercept(os, "fsync", "fsync", self.sync)
        self.intercept(os, "replace", "rename", self.move)
        self.intercept(os, "rename", "rename", self.move)
        self.intercept(os, "remove", "unlink", os.remove)
        self.intercept(os, "unlink", "unlink", os.unlink)

    def intercept(self, module: Any, name: str, label: str, body: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def intercepted(target: Any, *args: Any, **kwargs: Any) -> Any:
            is_here = isinstance(target, int) or str(target).startswith(self.folder)  # fsync has a descriptor
            reads = label == "open" and "r" in kwargs.get("mode", args[0] if args else "r")
            if reads or not is_here:
                return real(target, *args, **kwargs)
            return self.call(label, lambda: body(target, *args, **kwargs))

        setattr(module, name, intercepted)

    def call(self, label: str, body: Callable[[], Any], half: Callable[[], Any] = lambda: None) -> Any:
        self.calls.append(label)
        crashes = len(self.calls) - 1 == self.crash_at
        if crashes and self.moment in ("before", "half"):
            if self.moment == "half":
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        result = body()
        if crashes:
            if self.moment == "power":
                self.lose_power()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def lose_power(self) -> None:
        for source, target in reversed(self.renames):
            self.rename(target, source)
        for entry in os.scandir(self.folder):
            if entry.inode() in self.synced_sizes:
                os.truncate(entry.path, self.synced_sizes[entry.inode()])

    def open_file(self, path: str, mode: str) -> io.BufferedWriter:
        raw = _InterceptedFile(path, mode)
        raw.system = self
        self.synced_sizes[os.fstat(raw.fileno()).st_ino] = 0
        return io.BufferedWriter(raw, buffer_size=8192)  # as open() returns before Python 3.14

    def sync(self, descriptor: int) -> None:
        self.fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), os.stat(self.folder)):
            self.renames.clear()
        self.synced_sizes.pop(os.fstat(descriptor).st_ino, None)

    def move(self, source: str, target: str) -> None:
        self.rename(source, target)
        self.renames.append((source, target))


class _InterceptedFile(io.FileIO):
    system: CrashingSystem

    def write(self, data: Any) -> int:
        write = super().write
        self.system.synced_sizes.setdefault(os.fstat(self.fileno()).st_ino, 0)
        return self.system.call("write", lambda: write(data), half=lambda: write(data[: len(data) // 2]))


def save_in_fork(folder: Path, flush: bool, crash_at: int | None, moment: str, log: Path) -> int:
    """Saves step 3 in a fork of this process; returns its exit status, negative if a signal ended it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            system = CrashingSystem(str(folder), crash_at, moment)
            save(folder, 3, flush)
            log.write_text("\n".join(system.calls))
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash_at_every_call(path: str, flush: bool, moment: str) -> tuple[list[str], list[int]]:
    """For `run_ranks`: the calls of a save, and the step of the newest snapshot after a crash at each of them."""
    initial, log = Path(path, "initial"), Path(path, "calls")
    initial.mkdir()
    for step in (1, 2):
        SnapshotFolder(str(initial), keep=9).write(small_snapshot(step), flush=True)
    Path(initial, LEFTOVER).touch()
    assert save_in_fork(shutil.copytree(initial, Path(path, "no crash")), flush, None, moment, log) == 0
    calls, steps = log.read_text().split("\n"), []
    for number, call in enumerate(calls):
        if moment == "half" and call != "write":
            continue
        directory = shutil.copytree(initial, Path(path, str(number)))
        assert save_in_fork(directory, flush, number, moment, log) == -signal.SIGKILL, (number, call)
        folder = SnapshotFolder(str(directory))
        with redirect_stderr(io.StringIO()) as err:
            newest = folder.load_newest()
        assert newest is not None, (number, call)
        assert err.getvalue() == "", (number, call)
        assert all((weight == newest["step"]).all() for weight in newest["model"].values()), (number, call)
        steps.append(newest["step"])
        folder.make()
        save(directory, 4, False)
        assert os.listdir(directory) == ["step_00000004.pt"], (number, call)
        shutil.rmtree(directory)
    return calls, steps


@pytest.mark.parametrize(
    ("flush", "moment"),
    [(True, "before"), (True, "after"), (True, "half"), (True, "power"), (False, "after"), (False, "half")],
)
def test_a_crash_at_any_call_of_a_save_leaves_the_previous_snapshot_or_the_next(
    flush: bool, moment: str, tmp_path: Path
) -> None:
    """Step 3 is being saved."""
    [(calls, steps)] = run_ranks(1, crash_at_every_call, str(tmp_path), flush, moment, tmp_path=tmp_path)
    order = [call for call, _ in itertools.groupby(calls)]
    flushed = ["open", "write", "fsync", "rename", "open folder", "fsync", "unlink"]
    assert order == (flushed if flush else ["open", "write", "rename", "unlink"])
    assert calls.count("write") > 5
    assert calls.count("unlink") == 2
    assert steps == sorted(steps)
    assert set(steps) == ({2} if moment == "half" else {2, 3})
