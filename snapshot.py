"""What survives a failure? Write, verify, find, load, prune.

A snapshot is what torch.save writes, followed by a trailer of 40 bytes: a mark and the SHA-256 of all bytes before it.
torch.load does not look beyond the end of the zip archive, so any program opens the file; only we notice a flipped bit.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from errors import UserError

FORMAT = 1
MARK = b"GPTsnap1"
TRAILER = len(MARK) + hashlib.sha256().digest_size
NAME = re.compile(r"step_(\d{8})\.pt")
CHUNK = 1 << 20


class DamagedError(Exception):
    """The file is not what was written."""


class _HashingFile(io.RawIOBase):
    """Passes bytes on to a file and digests them on the way."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)


class SnapshotFolder:
    """The snapshots of a run: files `step_00000500.pt` in a local folder or at any fsspec URL.

    Args:
        path: the folder
        keep: how many of the newest stay; the best by validation loss stays too
    """

    def __init__(self, path: str, keep: int) -> None:
        try:
            self.fs, self.inside = fsspec.url_to_fs(path)  # the folder's name within its file system
        except (ValueError, ImportError) as error:
            raise UserError(f"trainer.snapshot_path: {path} can't be opened: {error}") from error
        self.local = isinstance(self.fs, LocalFileSystem)
        self.path = self.inside if self.local and "://" in path else path
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of which there is a snapshot, whole or not, oldest first."""
        return sorted(int(match[1]) for name in self._names() if (match := NAME.fullmatch(name)))

    def file(self, step: int) -> str:
        """Path or URL of the snapshot of a step."""
        return f"{self.path.rstrip('/')}/step_{step:08d}.pt"

    def _names(self) -> list[str]:
        try:
            return [os.path.basename(name) for name in self.fs.ls(self.inside, detail=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"trainer.snapshot_path: {self.path} can't be read: {error}") from error

    def write(self, snapshot: dict[str, Any], best_step: int | None) -> str:
        """Writes a snapshot, then deletes those that are no longer kept. Returns its path.

        Args:
            snapshot: what to save; its `step` names the file
            best_step: step of the snapshot with the lowest validation loss

        Raises:
            UserError: it can't be written. Those that were there before are untouched.
        """
        target = self.file(snapshot["step"])
        # A local file is renamed once it is on disk; an object store shows an upload only once it is complete.
        written = f"{target}.{os.getpid()}.tmp" if self.local else target
        try:
            self.fs.makedirs(self.inside, exist_ok=True)
            with self.fs.open(written, "wb") as file:
                hashing = _HashingFile(file)
                torch.save({"format": FORMAT, **snapshot}, hashing)  # type: ignore[arg-type]
                file.write(MARK + hashing.digest.digest())
                if self.local:
                    file.flush()
                    os.fsync(file.fileno())
            if self.local:
                os.replace(written, target)
                folder = os.open(self.inside, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
        except (OSError, RuntimeError) as error:  # torch's own writer makes a RuntimeError of a full disk
            with suppress(OSError):  # as much of it as was written would only take room
                if self.local:
                    os.unlink(written)
            raise UserError(f"trainer.snapshot_path: {target} can't be written: {error}") from error
        self._prune(snapshot["step"], best_step)
        return target

    def _prune(self, newest: int, best_step: int | None) -> None:
        # Files of later steps were found damaged when this run started. They don't count, and they stay as evidence.
        past = [step for step in self.steps() if step <= newest]
        doomed = [f"step_{step:08d}.pt" for step in past[: -self.keep] if step != best_step]
        torn = [name for name in self._names() if name.endswith(".tmp") and NAME.match(name)]
        for name in doomed + torn:
            self.fs.rm_file(f"{self.inside}/{name}")

    def newest(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """The newest whole snapshot, or None where there is none at all.

        Args:
            say: is told which files are damaged, and which one is used instead

        Raises:
            UserError: there are snapshots, and all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                snapshot = read(self.file(step))
            except DamagedError as error:
                say(f"{self.file(step)} is damaged ({error}) and skipped")
                continue
            if step != steps[-1]:
                say(f"{self.file(step)} is used instead")
            return snapshot
        if steps:
            raise UserError(
                f"trainer.snapshot_path: all {len(steps)} snapshots in {self.path} are damaged; move them away to "
                "start anew"
            )
        return None


def check_fits(header: dict[str, Any], config: dict[str, Any], vocabulary: str) -> None:
    """Makes sure that a snapshot's weights are of the model that is asked for; other keys may differ.

    Args:
        header: the snapshot, with or without its weights
        config: the five sections that run now, as plain dictionaries
        vocabulary: of the text that is trained on now

    Raises:
        UserError: a key that decides the weights' shapes or meaning, or the vocabulary, differs.
    """
    keys = [("model", key) for key in config["model"] if key != "dropout"] + [("data", "block_size")]
    for section, key in keys:
        now, then = config[section][key], header["config"][section][key]
        if now != then:
            raise UserError(
                f"{section}.{key} is {now}, but {then} in the snapshot of step {header['step']} in the run folder: "
                f"set it to {then} to go on, or set another trainer.run_dir to start anew"
            )
    known = header["vocabulary"]
    if vocabulary != known:
        new, old = (
            "".join(c for c in mine if c not in other) for mine, other in ((vocabulary, known), (known, vocabulary))
        )
        raise UserError(
            f"data.path: the text has {len(vocabulary)} distinct characters, but the snapshot of step {header['step']} "
            f"in the run folder {len(known)} (only in the text: {new!r}; only in the snapshot: {old!r}): "
            "use the snapshot's text to go on, or set another trainer.run_dir to start anew"
        )


def read(path: str) -> dict[str, Any]:
    """Reads a snapshot onto the CPU, mapped into memory, after its digest has been checked.

    Args:
        path: file or fsspec URL

    Raises:
        DamagedError: the digest does not fit, or it is no snapshot.
        FileNotFoundError: there is no such file.
    """
    fs, name = fsspec.url_to_fs(path)
    if isinstance(fs, LocalFileSystem):
        _check(name)
        return _load(name)
    with tempfile.TemporaryDirectory() as folder:  # mapped files outlive their names
        copy = str(Path(folder, "snapshot.pt"))
        fs.get_file(name, copy)
        _check(copy)
        return _load(copy)


def _check(name: str) -> None:
    size = os.path.getsize(name)
    digest = hashlib.sha256()
    with open(name, "rb") as file:
        for start in range(0, size - TRAILER, CHUNK):
            digest.update(file.read(min(CHUNK, size - TRAILER - start)))
        trailer = file.read()
    if size <= TRAILER or not trailer.startswith(MARK):
        raise DamagedError(f"{size} bytes without the mark at the end: cut short, or no snapshot of this program")
    if trailer != MARK + digest.digest():
        raise DamagedError("its bytes do not match their SHA-256")


def _load(name: str) -> dict[str, Any]:
    try:
        snapshot = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise DamagedError(f"torch.load refuses it: {error}") from error
    if snapshot["format"] != FORMAT:
        raise UserError(f"{name} has format {snapshot['format']}, this program reads {FORMAT}")
    return snapshot
