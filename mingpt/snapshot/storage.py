"""What survives a failure? Write, verify, find, load, prune.

A snapshot is what torch.save writes, followed by a trailer of 40 bytes: a mark, and a digest of all bytes before it,
which is the SHA-256 of the SHA-256 of each MiB, so that all cores check it. torch.load does not look beyond the end of
the zip archive, so any program opens the file; only we notice a flipped bit.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.utils.errors import UserError
from mingpt.utils.progress import BAR_OPTIONS

T = TypeVar("T")

FORMAT = 1
MARK = b"GPTsnap2"
OLD_MARK = b"GPTsnap1"  # of older snapshots: the SHA-256 of all bytes at once
TRAILER = len(MARK) + hashlib.sha256().digest_size
NAME = re.compile(r"step_(\d{8})\.pt")
LEFT = re.compile(r"step_\d{8}\.pt\..*\.tmp|.*\.mark")  # by those who were killed while writing, or starting
CHUNK = 1 << 20
RETRIES = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts at a folder that is reached over a network
DEADLINE = 60.0  # seconds after which no further attempt begins: a store's own library may try for long in each


class DamagedSnapshotError(Exception):
    """The file is not what was written."""


class PruneError(UserError):
    """The snapshot is written, but older ones that are no longer kept can't be deleted."""


# Trying again won't help.
DEFINITE = (FileNotFoundError, PermissionError, NotADirectoryError, FileExistsError, DamagedSnapshotError, UserError)


class _HashingFile(io.RawIOBase):
    """Passes bytes on to a file and digests them on the way."""

    def __init__(self, file: Any) -> None:
        self.file, self.size = file, 0
        self.chunk, self.whole = hashlib.sha256(), hashlib.sha256()  # whole: of the digests of whole chunks

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        while left:
            part = left[: CHUNK - self.size % CHUNK]
            self.chunk.update(part)
            self.size, left = self.size + len(part), left[len(part) :]
            if self.size % CHUNK == 0:
                self.whole.update(self.chunk.digest())
                self.chunk = hashlib.sha256()
        return self.file.write(data)

    def trailer(self) -> bytes:
        """The mark, and the digest of all that was written."""
        if self.size % CHUNK:
            self.whole.update(self.chunk.digest())
        return MARK + self.whole.digest()


def _serialise(content: dict[str, Any], file: Any) -> None:
    hashing = _HashingFile(file)
    torch.save(content, hashing)  # type: ignore[arg-type]
    file.write(hashing.trailer())


def _words(error: Exception) -> str:
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # what torch's own writer met: of a full disk it says "unexpected pos 960 vs 896"
    return str(error) or type(error).__name__


class SnapshotStorage:
    """The snapshots of a run: files `step_00000500.pt` in a local folder or at any fsspec URL.

    Args:
        path: the folder
        keep: how many of the newest stay; the best by validation loss stays too
    """

    def __init__(self, path: str, keep: int) -> None:
        try:
            self.fs, self.inside = fsspec.url_to_fs(path)  # the folder's name within its file system
        except (ValueError, ImportError) as error:
            raise UserError(
                f"trainer.snapshot_path: {path} can't be opened: {error}; it may be a folder, or a URL "
                "that fsspec knows"
            ) from error
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
            self.fs.invalidate_cache()  # others write here too
            return [os.path.basename(name) for name in self._patiently(self.fs.ls, self.inside, detail=False)]
        except FileNotFoundError:
            return []
        except Exception as error:  # each kind of store has its own
            raise UserError(
                f"trainer.snapshot_path: {self.path} can't be read: {_words(error)}; make it readable, or set another"
            ) from error

    def _patiently(self, action: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Tries again what a network or a busy store may have prevented, after longer and longer pauses."""
        deadline = time.monotonic() + DEADLINE
        pauses = [] if self.local else list(RETRIES)
        while True:
            try:
                return action(*args, **kwargs)
            except DEFINITE:
                raise
            except Exception:
                if not pauses or time.monotonic() > deadline:
                    raise
            time.sleep(pauses.pop(0))

    def mark(self, name: str) -> None:
        """Leaves an empty file, for other ranks to see whether they share the folder.

        Raises:
            UserError: nothing can be written here.
        """
        try:
            self._patiently(self.fs.makedirs, self.inside, exist_ok=True)
            self._patiently(self.fs.pipe_file, f"{self.inside}/{name}.mark", b"")
        except Exception as error:
            raise UserError(
                f"trainer.snapshot_path: {self.path} can't be written: {_words(error)}; make it writable, or "
                "set another"
            ) from error

    def is_marked(self, name: str) -> bool:
        """Whether the mark of that name is here."""
        self.fs.invalidate_cache()
        return self._patiently(self.fs.exists, f"{self.inside}/{name}.mark")

    def unmark(self, name: str) -> None:
        """Removes the mark."""
        with suppress(Exception):
            self.fs.rm_file(f"{self.inside}/{name}.mark")

    def write(self, snapshot: dict[str, Any], best_step: int | None) -> str:
        """Writes a snapshot, then deletes those that are no longer kept. Returns its path.

        Args:
            snapshot: what to save; its `step` names the file
            best_step: step of the snapshot with the lowest validation loss

        Raises:
            UserError: it can't be written. Those that were there before are untouched.
            NotPrunedError: it is written, but older ones can't be deleted.
        """
        target = self.file(snapshot["step"])
        content = {"format": FORMAT, **snapshot}
        try:
            if self.local:
                self.fs.makedirs(self.inside, exist_ok=True)
            self._patiently(self._write_beside_and_rename if self.local else self._upload, content, target)
        except Exception as error:  # torch's own writer makes a RuntimeError of a full disk, and stores have their own
            raise UserError(
                f"trainer.snapshot_path: {target} can't be written: {_words(error)}; make room, or make it writable"
            ) from error
        try:
            self._patiently(self._prune, snapshot["step"], best_step)
        except Exception as error:
            raise PruneError(
                f"trainer.snapshot_path: {target} is whole, but older ones can't be deleted and stay: {_words(error)}"
            ) from error
        return target

    def _write_beside_and_rename(self, content: dict[str, Any], target: str) -> None:
        beside = f"{target}.{uuid.uuid4().hex}.tmp"
        try:
            with open(beside, "wb") as file:
                _serialise(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            with suppress(OSError):  # as much of it as was written would only take room
                os.unlink(beside)
            raise
        folder = os.open(self.inside, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def _upload(self, content: dict[str, Any], target: str) -> None:
        file = self.fs.open(target, "wb")
        try:
            _serialise(content, file)
            file.close()  # an object store shows an upload only now that it is complete
        except BaseException:
            with suppress(Exception):
                file.discard()
            with suppress(AttributeError):
                file.closed = True  # fsspec closes what is collected, which would make half a snapshot visible
            raise

    def _prune(self, newest: int, best_step: int | None) -> None:
        # Files of later steps were found damaged when this run started. They don't count, and they stay as evidence.
        past = [step for step in self.steps() if step <= newest]
        doomed = [f"step_{step:08d}.pt" for step in past[: -self.keep] if step != best_step]
        torn = [name for name in self._names() if LEFT.fullmatch(name)]
        for name in doomed + torn:
            with suppress(FileNotFoundError):  # another machine was quicker
                self.fs.rm_file(f"{self.inside}/{name}")

    def newest(self, say: Callable[[str], None]) -> dict[str, Any] | None:
        """The newest whole snapshot, or None where there is none at all.

        Args:
            say: is told which files are damaged, and which one is used instead

        Raises:
            UserError: there are snapshots, and all are damaged; or the newest can't be read.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                snapshot = self._patiently(load_snapshot, self.file(step))
            except (DamagedSnapshotError, FileNotFoundError) as error:
                say(f"{self.file(step)} is damaged ({error}) and skipped")
                continue
            except UserError:
                raise
            except Exception as error:  # not damaged, so an older one won't do in its place
                raise UserError(
                    f"trainer.snapshot_path: {self.file(step)} can't be read: {_words(error)}; make it readable, or "
                    "move it away to go on from the one before"
                ) from error
            if step != steps[-1]:
                say(f"{self.file(step)} is used instead")
            return snapshot
        if steps:
            raise UserError(
                f"trainer.snapshot_path: all {len(steps)} snapshots in {self.path} are damaged; move them away to "
                "start anew"
            )
        return None


def load_snapshot(path: str) -> dict[str, Any]:
    """Reads a snapshot onto the CPU, mapped into memory, after its digest has been checked.

    Args:
        path: file or fsspec URL

    Raises:
        DamagedError: the digest does not fit, or it is no snapshot.
        FileNotFoundError: there is no such file.
    """
    with local_copy(path) as name:  # mapped files outlive their names
        _check(name)
        return _load(name)


@contextmanager
def local_copy(path: str) -> Iterator[str]:
    """The name of a local file with the bytes of this file or fsspec URL, until the context is left.

    Raises:
        FileNotFoundError: there is no such file.
    """
    fs, name = fsspec.url_to_fs(path)
    if isinstance(fs, LocalFileSystem):
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = str(Path(folder, "snapshot.pt"))
        fs.get_file(name, copy)
        yield copy


def _check(name: str) -> None:
    size = os.path.getsize(name)
    content = max(0, size - TRAILER)
    with (
        open(name, "rb") as file,
        ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as cores,
    ):  # hashing leaves the interpreter's lock alone

        def chunk(start: int) -> bytes:
            return os.pread(file.fileno(), min(CHUNK, content - start), start)

        trailer = os.pread(file.fileno(), TRAILER, content)
        mark, expected = trailer[: len(MARK)], trailer[len(MARK) :]
        if not content or mark not in (MARK, OLD_MARK):
            raise DamagedSnapshotError(
                f"{size} bytes without the mark at the end: cut short, or no snapshot of this program"
            )
        starts, whole = range(0, content, CHUNK), hashlib.sha256()
        parts: Iterator[bytes] = map(chunk, starts)
        if mark == MARK:
            parts = cores.map(lambda start: hashlib.sha256(chunk(start)).digest(), starts)
        for part in tqdm(parts, f"reading {os.path.basename(name)}", len(starts), unit="MiB", **BAR_OPTIONS):
            whole.update(part)
    if whole.digest() != expected:
        raise DamagedSnapshotError("its bytes do not match their SHA-256")


def _load(name: str) -> dict[str, Any]:
    try:
        snapshot = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise DamagedSnapshotError(f"torch.load refuses it: {error}") from error
    if snapshot["format"] != FORMAT:
        raise UserError(
            f"{name} has format {snapshot['format']}, this program reads {FORMAT}: take the program that wrote it"
        )
    return snapshot


def fingerprint(tensors: dict[str, Any]) -> str:
    """A digest of tensors under their names, nested or not: equal for equal bits, whatever file they came in."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, dict):
            digest.update(f"{name}/{fingerprint(value)}".encode())
        else:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
