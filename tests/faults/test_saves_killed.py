"""A save that is cut off at any moment, by SIGKILL or by a loss of power, leaves a whole snapshot and nothing torn."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import run_ranks

from mingpt.snapshot.storage import SnapshotStorage
from mingpt.utils.errors import UserError

STALE = "step_00000001.pt.77.tmp"  # what an earlier killed save left: pruning has two files to unlink


def snapshot(step: int) -> dict[str, Any]:
    """Larger than the file's buffer, so that it takes several writes."""
    return {"step": step, "model": {name: torch.full((5000,), float(step)) for name in ("a", "b", "c")}}


class Machine:
    """Stands between a save and the system: notes each call that changes a folder, and ends the process at one of them.

    Args:
        folder: only what happens in it counts
        fatal: number of the call to die at; None: none
        moment: `before` the call, `after` it, `half` way through a write, or after it by a loss of `power`, which also
            takes what was not synced: contents of files, and names in the folder. Deletions are taken to be on disk at
            once, which is the worst that may happen.
    """

    def __init__(self, folder: str, fatal: int | None, moment: str) -> None:
        self.folder, self.fatal, self.moment = folder, fatal, moment
        self.calls: list[str] = []
        self.unsynced: dict[int, int] = {}  # inode -> size that is on disk
        self.renamed: list[tuple[str, str]] = []
        self.real: dict[str, Callable[..., Any]] = {}
        self.pass_through(builtins, "open", "open", self.open)
        self.pass_through(os, "open", "open folder", os.open)
        self.pass_through(os, "fsync", "fsync", self.fsync)
        for name in ("rename", "replace"):
            self.pass_through(os, name, "rename", self.rename)
        for name in ("remove", "unlink"):
            self.pass_through(os, name, "unlink", os.unlink)

    def pass_through(self, module: Any, name: str, label: str, body: Callable[..., Any]) -> None:
        real = self.real[label] = getattr(module, name)

        def called(target: Any, *args: Any, **kwargs: Any) -> Any:
            ours = isinstance(target, int) or str(target).startswith(self.folder)  # fsync has a descriptor
            reads = label == "open" and "r" in kwargs.get("mode", args[0] if args else "r")
            if reads or not ours:
                return real(target, *args, **kwargs)
            return self.call(label, lambda: body(target, *args, **kwargs))

        setattr(module, name, called)

    def call(self, label: str, body: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        self.calls.append(label)
        fatal = len(self.calls) - 1 == self.fatal
        if fatal and self.moment == "half" and half:
            half()
        if fatal and self.moment in ("before", "half"):
            self.die()
        result = body()
        if fatal:
            self.die()
        return result

    def die(self) -> NoReturn:
        if self.moment == "power":
            for source, target in reversed(self.renamed):
                self.real["rename"](target, source)
            for entry in os.scandir(self.folder):
                if entry.inode() in self.unsynced:
                    os.truncate(entry.path, self.unsynced[entry.inode()])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("survived SIGKILL")

    def open(self, path: str, mode: str) -> io.BufferedWriter:
        raw = _File(path, mode)
        raw.machine = self
        self.unsynced[os.fstat(raw.fileno()).st_ino] = 0
        return io.BufferedWriter(raw)  # what open() itself returns

    def fsync(self, descriptor: int) -> None:
        self.real["fsync"](descriptor)
        if os.path.samestat(os.fstat(descriptor), os.stat(self.folder)):
            self.renamed.clear()
        self.unsynced.pop(os.fstat(descriptor).st_ino, None)

    def rename(self, source: str, target: str) -> None:
        self.real["rename"](source, target)
        self.renamed.append((source, target))


class _File(io.FileIO):
    """An open file whose writes are the system's."""

    machine: Machine

    def write(self, data: Any) -> int:
        write = super().write
        self.machine.unsynced.setdefault(os.fstat(self.fileno()).st_ino, 0)
        return self.machine.call("write", lambda: write(data), half=lambda: write(data[: len(data) // 2]))


def in_a_fork(body: Callable[[], Any]) -> int:
    """Runs the body in a copy of this process; returns its exit status, negative if a signal ended it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at_every_call(place: str, moment: str) -> tuple[list[str], list[tuple]]:
    """The calls of a save, and what was found after each death: (call, exit status, what newest gave, said, names)."""
    calm, log = Path(place, "calm"), Path(place, "calls")
    SnapshotStorage(str(calm), keep=1).write(snapshot(1), None)
    Path(calm, STALE).write_text("torn")

    def save(folder: Path, fatal: int | None) -> None:
        machine = Machine(str(folder), fatal, moment)
        SnapshotStorage(str(folder), keep=1).write(snapshot(2), None)
        log.write_text("\n".join(machine.calls))

    assert in_a_fork(lambda: save(shutil.copytree(calm, Path(place, "undisturbed")), None)) == 0
    calls = log.read_text().split("\n")
    found = []
    for fatal, call in enumerate(calls):
        if moment == "half" and call != "write":
            continue
        folder = shutil.copytree(calm, Path(place, str(fatal)))
        status = in_a_fork(lambda folder=folder, fatal=fatal: save(folder, fatal))
        said: list[str] = []
        snapshots = SnapshotStorage(str(folder), keep=1)
        try:
            loaded = snapshots.newest(said.append)
        except UserError as error:
            loaded, said = None, [*said, str(error)]
        values = loaded and {value for weight in loaded["model"].values() for value in weight.unique().tolist()}
        snapshots.write(snapshot(3), None)
        found.append((f"{fatal} {call}", status, loaded and (loaded["step"], values), said, os.listdir(folder)))
        shutil.rmtree(folder)
    return calls, found


@pytest.mark.parametrize("moment", ["before", "after", "half", "power"])
def test_a_save_that_dies_at_any_call_leaves_the_old_snapshot_or_the_new_one(moment: str, tmp_path: Path) -> None:
    [(calls, found)] = run_ranks(1, die_at_every_call, str(tmp_path), moment, tmp_path=tmp_path)
    assert calls.count("write") > 5, calls
    for call, status, loaded, said, after_the_next in found:
        assert status == -signal.SIGKILL, call
        assert loaded in ((1, {1.0}), (2, {2.0})), (call, said)
        assert said == [], call
        assert after_the_next == ["step_00000003.pt"], call
    whole = [loaded[0] for _, _, loaded, _, _ in found]
    assert whole == sorted(whole)
    assert set(whole) == ({1} if moment == "half" else {1, 2})


def test_a_save_syncs_before_it_renames_and_unlinks_only_then(tmp_path: Path) -> None:
    """Guards the test above: its deaths are at every kind of call."""
    [(calls, _)] = run_ranks(1, die_at_every_call, str(tmp_path), "half", tmp_path=tmp_path)
    order = [call for call, before in zip(calls, [None, *calls], strict=False) if call != before]
    assert order == ["open", "write", "fsync", "rename", "open folder", "fsync", "unlink"]
    assert calls.count("unlink") == 2
