"""The folder of a run's snapshots: writes, finds and loads them, and deletes those that have expired."""

import errno
import hashlib
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from mingpt.config.schema import TrainerConfig
from mingpt.errors import UserError
from mingpt.files import replaced_file
from mingpt.monitoring.logging import logger
from mingpt.snapshot.format import Snapshot, check_content

SNAPSHOT_NAME = re.compile(r"step_(\d{8})\.pt")
LEFTOVER_NAME = re.compile(rf"{SNAPSHOT_NAME.pattern}\.[0-9a-f]{{32}}\.tmp")  # a killed process has left it


class DamagedSnapshotError(Exception):
    """The bytes of the file differ from the written ones."""


@contextmanager
def raise_user_error(problem: str, advice: str) -> Iterator[None]:
    """Turns any exception into a UserError. Each kind of store has its own classes."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem}: {error}; {advice}") from error


def snapshot_name(step: int) -> str:
    return f"step_{step:08d}.pt"


def expired_steps(steps: Sequence[int], save_every: int, best: int | None, keep: int) -> list[int]:
    """Returns the steps whose snapshots are deleted: all but the newest, the best, and the newest scheduled ones.

    Args:
        steps: steps in ascending order
        save_every: the scheduled ones are multiples of it
        keep: number of scheduled ones to keep
    """
    stays = {*steps[-1:], best, *[step for step in steps if step % save_every == 0][-keep:]}
    return [step for step in steps if step not in stays]


class SnapshotFolder:
    """The snapshots of a run: files `step_00000500.pt` in a local folder or at any fsspec URL.

    A file with that name is complete. Its CRC-32 detects damage, for example by a power failure before a file was
    flushed to disk.

    The methods raise a UserError if the folder can't be read or written.

    Args:
        path: folder or URL
        save_every, keep: see `expired_steps`
    """

    def __init__(self, path: str, save_every: int = 1, keep: int = 1) -> None:
        with raise_user_error(f"{path} can't be opened", "it must be a folder, or a URL for fsspec"):
            self.fs, self.root = fsspec.url_to_fs(path)
        self.path = path.rstrip("/")  # for messages
        self.save_every = save_every
        self.keep = keep

    def make(self) -> None:
        """Makes the folder and its parents if they are missing. Deletes files that killed processes have left."""
        with raise_user_error(f"{self.path} can't be written", "make it writable, or set another folder"):
            self.fs.makedirs(self.root, exist_ok=True)
        for name in self._names():
            if LEFTOVER_NAME.fullmatch(name):
                self._remove(name)

    def files(self) -> dict[int, str]:
        """Returns the names of all snapshots by step, in ascending order, damaged ones included."""
        matches = map(SNAPSHOT_NAME.fullmatch, self._names())
        return dict(sorted((int(match[1]), match[0]) for match in matches if match))

    def file(self, step: int) -> str:
        """Returns the path of a snapshot, for messages and for `load_snapshot`."""
        return f"{self.path}/{snapshot_name(step)}"

    def _names(self) -> list[str]:
        with raise_user_error(f"{self.path} can't be read", "make it readable, or name another folder"):
            try:
                self.fs.invalidate_cache()  # other processes also write here
                return [os.path.basename(name) for name in self.fs.ls(self.root, detail=False)]
            except FileNotFoundError:
                return []

    def load_newest(self, after: int = -1) -> Snapshot | None:
        """Loads the newest undamaged snapshot after a step. Returns None if there is none. Warnings name damaged files.

        Raises:
            UserError: the newest one can't be read.
        """
        tried: set[int] = set()
        # A file that a run has just deleted has a successor, which only a new listing contains.
        while steps := [step for step in self.files() if step > after and step not in tried]:
            path = self.file(steps[-1])
            tried.add(steps[-1])
            with raise_user_error(f"{path} can't be read", "make it readable, or move it away"):
                try:
                    return load_snapshot(path)
                except FileNotFoundError:
                    pass
                except DamagedSnapshotError as error:
                    logger.warning(f"{path} is damaged ({error}) and skipped")
        return None

    def prune(self, newest: int, best: int | None) -> None:
        """Deletes the snapshots up to step `newest` that have expired."""
        for step in expired_steps([step for step in self.files() if step <= newest], self.save_every, best, self.keep):
            self._remove(snapshot_name(step))

    def _remove(self, name: str) -> None:
        with raise_user_error(f"{self.path}/{name} can't be deleted", "make it writable"), suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.root}/{name}")  # another machine may have deleted it

    def write(self, snapshot: Snapshot, flush: bool) -> None:
        """Writes a snapshot to a local folder, then deletes those that have expired.

        Args:
            flush: whether to flush it to disk. A killed process loses nothing of the page cache, but a machine does

        Raises:
            UserError: the snapshot can't be written. Existing snapshots are unchanged.
        """
        step = snapshot["step"]
        with raise_user_error(f"{self.file(step)} can't be written", "free disk space, or make the folder writable"):
            try:
                with replaced_file(f"{self.root}/{snapshot_name(step)}", flush) as file:
                    torch.save(snapshot, file)
            except RuntimeError as error:  # on a full disk, it is "unexpected pos 960 vs 896" after an OSError
                raise error.__context__ or error from None
        self.prune(step, snapshot["best"]["step"])


def open_folders(config: TrainerConfig) -> tuple[SnapshotFolder, SnapshotFolder | None]:
    """Returns the folder of a run's snapshots, and the mirror if there is one: the run's folder at that path or URL."""
    local = SnapshotFolder(f"{config.run_dir}/snapshots", config.save_every, config.keep_snapshots)
    if config.snapshot_path is None:
        return local, None
    name = Path(config.run_dir).resolve().name
    return local, SnapshotFolder(f"{config.snapshot_path}/{name}", config.save_every, config.keep_snapshots)


def sync(local: SnapshotFolder, mirror: SnapshotFolder, newest: int, best: int | None) -> None:
    """Uploads the newest flushed snapshot and the best one, then deletes expired snapshots of the mirror.

    It compares names and sizes, so it does nothing if the mirror is complete. Damaged files are not uploaded. The
    store's own client repeats failed requests. Object stores show a file when it is complete; other stores may show a
    part of one.
    """
    present = mirror.files()
    for step, name in local.files().items():
        path = f"{local.root}/{name}"
        copy = f"{mirror.root}/{name}"
        with raise_user_error(f"{mirror.file(step)} can't be written", "make it writable, or set another URL"):
            try:
                size = os.path.getsize(path)
                if step in (newest, best) and not (step in present and mirror.fs.size(copy) == size):
                    check_crc32(path)
                    mirror.fs.put_file(path, copy)
            except DamagedSnapshotError as error:
                logger.warning(f"{path} is damaged ({error}) and not uploaded")
            except FileNotFoundError:
                if os.path.exists(path):
                    raise
                # It has expired during an earlier upload. The save of its successor starts another one.
    mirror.prune(newest, best)


def load_snapshot(path: str) -> Snapshot:
    """Checks a file or fsspec URL for damage, and loads it onto the CPU, mapped into memory.

    Raises:
        DamagedSnapshotError: its bytes do not match their CRC-32, or it is not a file of torch.save.
        FileNotFoundError: the file does not exist.
        UserError: the file contains code, or another program or version has written it.
    """
    with local_copy(path) as name:  # a mapping stays valid after the file is deleted
        check_crc32(name)
        try:
            snapshot = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise UserError(f"{path} is not damaged, but torch.load refuses it: {error}") from error
        except (RuntimeError, ValueError) as error:  # a damaged list of parts, or a damaged header
            raise DamagedSnapshotError(f"torch.load refuses it: {error}") from error
    check_content(snapshot, path)
    return snapshot


def check_crc32(name: str) -> None:
    """Compares the parts of a snapshot, which is a zip archive, with their CRC-32.

    It reads the file, because an error in a mapped file ends the process by SIGBUS instead of raising an OSError. It
    does not check the space between parts and unused fields of headers, which do not change the result of torch.load:
    of 150,000 damaged files (bits, words, pages, truncation), all were refused or bitwise identical when loaded.

    Raises:
        DamagedSnapshotError: names the part.
    """
    try:
        with zipfile.ZipFile(name) as archive:
            part = archive.testzip()
    except Exception as error:  # zipfile raises a dozen classes
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek to a damaged offset
            raise
        raise DamagedSnapshotError(f"cut short, or not a file of torch.save: {error}") from error
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
    """Returns a digest of tensors by name, which may be nested. It is equal for equal names, shapes, dtypes, bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, dict):
            digest.update(f"{name}/{fingerprint(value)}".encode())
        else:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
