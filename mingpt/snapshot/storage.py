"""The snapshots of a run, in a local folder or an object store: writing, finding, loading and pruning."""

import errno
import hashlib
import os
import pickle
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.errors import UserError
from mingpt.files import replaced_file
from mingpt.monitoring.live_line import BAR_OPTIONS
from mingpt.monitoring.logging import logger
from mingpt.snapshot.format import FORMAT_VERSION, check_content

T = TypeVar("T")

SNAPSHOT_NAME = re.compile(r"(step|frequent)_(\d{8})\.pt")
# Files that killed processes leave behind. Each name contains a UUID, since the folder may hold other files.
LEFTOVER_NAME = re.compile(rf"{SNAPSHOT_NAME.pattern}\.[0-9a-f]{{32}}\.tmp|[0-9a-f]{{32}}\.mark")
RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts on a remote file system
RETRY_DEADLINE = 60.0  # seconds after which no attempt begins: in each, the store's own client may retry for long


class DamagedSnapshotError(Exception):
    """The bytes of the file differ from the written ones."""


NO_RETRY = (FileNotFoundError, PermissionError, NotADirectoryError, FileExistsError, DamagedSnapshotError, UserError)


@contextmanager
def _raise_user_error(problem: str, advice: str) -> Iterator[None]:
    """Raises a UserError for any exception: each kind of store has its own classes, and torch.save a RuntimeError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"trainer.snapshot_path: {problem}: {_reason(error)}; {advice}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # for a full disk, torch.save says "unexpected pos 960 vs 896"
    return str(error) or type(error).__name__


class SnapshotStorage:
    """The snapshots of a run: files `step_00000500.pt` in a local folder or at any fsspec URL.

    Frequent snapshots are `frequent_00000500.pt`. They are not flushed to disk: a killed process loses nothing of the
    page cache, and after a power failure their CRC-32 tells which ones are whole.

    The methods raise a UserError if the folder can't be read or written.

    Args:
        path: folder or URL
        keep: number of newest snapshots to keep, in addition to the one with the lowest validation loss
        is_frequent: the snapshots are frequent ones
    """

    def __init__(self, path: str, keep: int, is_frequent: bool = False) -> None:
        with _raise_user_error(f"{path} can't be opened", "it may be a folder, or a URL that fsspec knows"):
            self.fs, self.root = fsspec.url_to_fs(path)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.path = path.rstrip("/")  # the name in messages
        self.keep = keep
        self.is_frequent = is_frequent
        self.prefix = "frequent" if is_frequent else "step"

    def steps(self) -> list[int]:
        """Returns the steps of all snapshots, damaged ones included, in ascending order."""
        matches = filter(None, map(SNAPSHOT_NAME.fullmatch, self._names()))
        return sorted(int(step) for prefix, step in (match.groups() for match in matches) if prefix == self.prefix)

    def file(self, step: int) -> str:
        """Returns the path of a snapshot, for messages and for `load_snapshot`."""
        return f"{self.path}/{self._file_name(step)}"

    def _file_name(self, step: int) -> str:
        return f"{self.prefix}_{step:08d}.pt"

    def _names(self) -> list[str]:
        with _raise_user_error(f"{self.path} can't be read", "make it readable, or set another"):
            try:
                self.fs.invalidate_cache()  # other processes write here too
                return [os.path.basename(name) for name in self._retry(self.fs.ls, self.root, detail=False)]
            except FileNotFoundError:
                return []

    def _retry(self, action: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        deadline = time.monotonic() + RETRY_DEADLINE
        for delay in () if self.is_local else RETRY_DELAYS:
            try:
                return action(*args, **kwargs)
            except NO_RETRY:
                raise
            except Exception:
                if time.monotonic() > deadline:
                    raise
            time.sleep(delay)
        return action(*args, **kwargs)

    def put_marker(self, name: str) -> None:
        """Writes an empty file. Ranks that find it share the folder with this one."""
        with _raise_user_error(f"{self.path} can't be written", "make it writable, or set another"):
            self._retry(self.fs.makedirs, self.root, exist_ok=True)
            self._retry(self.fs.pipe_file, f"{self.root}/{name}.mark", b"")

    def markers(self) -> set[str]:
        return {name.removesuffix(".mark") for name in self._names() if name.endswith(".mark")}

    def remove_marker(self, name: str) -> None:
        with suppress(Exception):
            self.fs.rm_file(f"{self.root}/{name}.mark")

    def write(self, snapshot: dict[str, Any], best_step: int | None) -> None:
        """Writes a snapshot, then deletes snapshots that are no longer kept. It warns if they can't be deleted.

        Raises:
            UserError: the snapshot can't be written. Existing snapshots are unchanged.
        """
        shown = self.file(snapshot["step"])
        target = f"{self.root}/{self._file_name(snapshot['step'])}"
        content = {"format": FORMAT_VERSION, **snapshot}
        with _raise_user_error(f"{shown} can't be written", "make room, or make it writable"):
            if self.is_local:
                with replaced_file(target, flush=not self.is_frequent) as file:
                    torch.save(content, file)
            else:
                self._retry(self._upload, content, target)
        try:
            self._retry(self._prune, snapshot["step"], best_step)
        except Exception as error:
            logger.warning(f"trainer.snapshot_path: {self.path}: old snapshots can't be deleted: {_reason(error)}")

    def _upload(self, content: dict[str, Any], target: str) -> None:
        file = self.fs.open(target, "wb")
        try:
            torch.save(content, file)
            file.close()  # only now does an object store show the file
        except BaseException:
            with suppress(Exception):
                file.discard()
            with suppress(AttributeError):
                file.closed = True  # or garbage collection would close it, and complete the upload
            raise

    def _prune(self, newest: int, best_step: int | None) -> None:
        # Files of later steps were found damaged when this run started. They don't count, and they stay as evidence.
        past = [step for step in self.steps() if step <= newest]
        expired = [self._file_name(step) for step in past[: -self.keep] if step != best_step]
        leftovers = [name for name in self._names() if LEFTOVER_NAME.fullmatch(name)]
        self._remove(expired + leftovers)

    def remove(self, keep: int = 0) -> None:
        """Deletes all snapshots except the newest ones, if the file system allows it."""
        with suppress(Exception):
            steps = self.steps()
            self._remove(map(self._file_name, steps[: len(steps) - keep]))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):  # another machine may have deleted it
                self.fs.rm_file(f"{self.root}/{name}")

    def load_newest(self, first_step: int = 0) -> dict[str, Any] | None:
        """Loads the newest undamaged snapshot. Returns None if there are no snapshots.

        Warnings name damaged files, and the older file that is used instead.

        Args:
            first_step: ignore earlier snapshots, since the caller has one of this step

        Raises:
            UserError: the newest one can't be read, or all are damaged. Frequent ones may all be damaged.
        """
        steps = [step for step in self.steps() if step >= first_step]
        for step in reversed(steps):
            path = self.file(step)
            advice = "make it readable, or move it away to continue from the previous one"
            with _raise_user_error(f"{path} can't be read", advice):
                try:
                    snapshot = self._retry(load_snapshot, path)
                except (DamagedSnapshotError, FileNotFoundError) as error:
                    logger.warning(f"{path} is damaged ({error}) and skipped")
                    continue
            if step != steps[-1]:
                logger.warning(f"{path} is used instead")
            return snapshot
        if steps and first_step == 0 and not self.is_frequent:
            raise UserError(
                f"trainer.snapshot_path: all {len(steps)} snapshots in {self.path} are damaged; move them away to "
                "start again from step 0"
            )
        return None


def load_snapshot(path: str) -> dict[str, Any]:
    """Checks a file or fsspec URL for damage, and loads it onto the CPU, mapped into memory.

    Raises:
        DamagedSnapshotError: its bytes do not match their CRC-32, or it is not a file of torch.save.
        FileNotFoundError: the file does not exist.
        UserError: `check_content` refuses it.
    """
    with local_copy(path) as name:  # a mapping stays valid after the file is deleted
        check_crc32(name)
        try:
            snapshot = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise DamagedSnapshotError(f"torch.load refuses it: {error}") from error
    check_content(snapshot, path)
    return snapshot


def check_crc32(name: str) -> None:
    """Compares the parts of a snapshot, which is a zip archive, with their CRC-32.

    It reads the file: where reading raises an OSError, access to a mapping would end the process by SIGBUS. It does not
    check the space between parts and unused fields of headers, which do not change the result of torch.load: of 150,000
    damaged files (bits, words, pages, truncation), all were refused or bitwise identical when loaded.

    Raises:
        DamagedSnapshotError: names the part.
    """
    bar = {"desc": f"reading {os.path.basename(name)}", "total": os.path.getsize(name), **BAR_OPTIONS}
    with open(name, "rb") as file, tqdm.wrapattr(file, "read", **bar) as shown:
        try:
            with zipfile.ZipFile(shown) as archive:  # type: ignore[call-overload]
                part = archive.testzip()
        except Exception as error:  # zipfile raises a dozen classes
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek to a damaged offset
                raise
            raise DamagedSnapshotError(f"cut short, or damaged in the list of its parts: {error}") from error
    if part is not None:
        raise DamagedSnapshotError(f"the bytes of its part {part} do not match their CRC-32")


@contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Context manager that yields the name of a local file with the bytes of a file or fsspec URL."""
    fs, name = fsspec.url_to_fs(path)
    if isinstance(fs, LocalFileSystem):
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = f"{folder}/snapshot.pt"
        fs.get_file(name, copy)
        yield copy


def fingerprint(tensors: dict[str, Any]) -> str:
    """Returns a digest of tensors by name, maybe nested. Equal names, shapes, dtypes and bits give equal digests."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, dict):
            digest.update(f"{name}/{fingerprint(value)}".encode())
        else:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
