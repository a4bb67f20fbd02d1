"""Locks folders, so that only one run at a time writes to a folder, even if several hosts share it."""

import fcntl
import json
import os
import platform
import time
import uuid
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from mingpt.errors import UserError
from mingpt.files import make_folder
from mingpt.monitoring.logging import logger

LOCK_NAME = ".lock"
LOCK_TIMEOUT = 5.0  # seconds to wait for another run to exit
RETRY_SECONDS = 0.1


class RunLock:
    """The locks of the folders that a run writes to, held until `close` or the end of the process.

    Attributes:
        id: identifies this lock in the files of its folders, on all machines
        writing: a thread's newest write to these folders, which a lock outlasts

    Args:
        folders: folder -> configuration key of the folder, for messages

    Raises:
        UserError: another process, or another Trainer of this process, holds a lock, or a folder can't be written.
    """

    def __init__(self, folders: dict[Path, str]) -> None:
        self.id = uuid.uuid4().hex
        self.descriptors: dict[Path, int] = {}
        self.writing: Future[Any] | None = None
        try:
            for folder, key in folders.items():
                self.descriptors[folder] = lock_folder(folder, key, self.id)
        except UserError:
            self.close()
            raise

    def lost_folder(self) -> Path | None:
        """Returns a folder that was deleted, moved or replaced, so that another process may lock its path, or None."""
        for folder, descriptor in self.descriptors.items():
            with suppress(OSError):
                os.utime(descriptor)  # cleaners of scratch disks delete old files
            if not _is_at(folder / LOCK_NAME, descriptor):
                return folder
        return None

    def check(self) -> None:
        """Raises a UserError if a folder is lost. A save would create it again, or write to another run's folder."""
        if folder := self.lost_folder():
            raise UserError(
                f"{folder}, the folder of this run, was deleted, moved or replaced, so the run ends without saving; if "
                "it was moved, move it back and run the same command to resume"
            )

    def close(self) -> None:
        if self.writing is not None and not self.writing.done():
            self.writing.add_done_callback(lambda _: self.close())
            return
        while self.descriptors:
            _, descriptor = self.descriptors.popitem()
            os.close(descriptor)


def lock_folder(folder: Path, key: str, lock_id: str) -> int:
    """Locks a folder; returns a file descriptor, which holds the lock until it is closed or the process ends.

    The lock is a `flock` on a file in the folder. It also excludes other containers and, if the file system supports
    it, other hosts. After a host is lost, an NFS server keeps its locks for 90 seconds (the default lease of the Linux
    server). Other file systems may keep them forever.

    Args:
        key: configuration key of the folder, for messages

    Raises:
        UserError: another process holds the lock, or the folder can't be written.
    """
    file = folder / LOCK_NAME
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        make_folder(folder, key)
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"{key}: {error.filename} can't be written: {error.strerror}; set it to a folder that you may write to"
            ) from error
        if _try_lock(descriptor, file):
            holder = {"process": os.getpid(), "host": platform.node(), "id": lock_id}
            with suppress(OSError):  # the lock also holds on a full disk
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
                os.fsync(descriptor)  # otherwise an NFS client would not show it to other machines until later
            return descriptor
        holder = read_holder(folder)
        os.close(descriptor)
        if time.monotonic() > deadline:
            process = f"process {holder['process']}" if holder else "another process"
            if holder and holder["host"] != platform.node():
                process += f" on {holder['host']} (if that host is lost, delete {file})"
            raise UserError(
                f"{key}: {process} is training in {folder}; wait for it, stop it (a Trainer in a notebook by its "
                f"`close()`), or set another {key}"
            )
        time.sleep(RETRY_SECONDS)


def _try_lock(descriptor: int, file: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(f"{file} can't be locked: {error.strerror}; make sure that no other process trains there")
    return _is_at(file, descriptor)  # the folder may have been deleted before the lock


def _is_at(file: Path, descriptor: int) -> bool:
    """Returns whether the path still leads to the open file, and True if the file system does not respond."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # the network may be down, and the folder may be back later
        return True


def read_holder(folder: Path | str) -> dict[str, Any]:
    """Returns process, host and id of the lock of a folder. The result is empty if there is none."""
    with suppress(OSError, ValueError):
        os.listdir(folder)  # refreshes an NFS client's cache of the folder
        return json.loads((Path(folder) / LOCK_NAME).read_bytes())
    return {}
