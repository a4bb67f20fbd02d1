"""Locks a run folder, so that only one run at a time writes to it, even if several hosts share it."""

import fcntl
import json
import os
import platform
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from mingpt.errors import UserError
from mingpt.monitoring.logging import logger

LOCK_NAME = ".lock"
LOCK_TIMEOUT = 5.0  # seconds to wait for another run to exit
RETRY_SECONDS = 0.1


class RunLock:
    """The lock of a run folder, held until `close` or the end of the process.

    It is a `flock` on a file in the folder. It also excludes other containers and, if the file system supports it,
    other hosts. After a host is lost, an NFS server keeps its locks for 90 seconds (the default lease of the Linux
    server). Other file systems may keep them forever.

    Attributes:
        id: identifies this lock in the file, on all machines

    Raises:
        UserError: another process, or another Trainer of this process, holds the lock, or the folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / LOCK_NAME
        self.id = uuid.uuid4().hex
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not self._try_lock():
            if time.monotonic() > deadline:
                holder = read_holder(folder)
                process = f"process {holder.get('process')} on {holder.get('host')}"
                raise UserError(
                    f"trainer.run_dir: {process} is training in {folder}; wait for it, stop it (a Trainer in a "
                    f"notebook by its `close()`), or set another trainer.run_dir; if it is lost, delete {self.file}"
                )
            time.sleep(RETRY_SECONDS)
        holder = {"process": os.getpid(), "host": platform.node(), "id": self.id}
        with suppress(OSError):  # the lock also holds on a full disk
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, json.dumps(holder).encode(), 0)
            os.fsync(self.descriptor)  # otherwise an NFS client would not show it to other machines until later

    def _try_lock(self) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: {error.filename} can't be written: {error.strerror}; set it to a folder that you "
                "may write to"
            ) from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        except OSError as error:
            logger.warning(
                f"{self.file} can't be locked: {error.strerror}; make sure that no other process trains there"
            )
        return True

    def check(self) -> None:
        """Raises a UserError if the folder was deleted or replaced. A save might go to another run's folder."""
        try:
            if os.path.samestat(os.stat(self.file), os.fstat(self.descriptor)):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # the network may be down, and the folder may be back later
            return
        raise UserError(
            f"{self.folder}, the folder of this run, was deleted, moved or replaced, so the run ends without saving; "
            "if it was moved, move it back and run the same command to resume"
        )

    def close(self) -> None:
        os.close(self.descriptor)


def read_holder(folder: Path) -> dict[str, Any]:
    """Returns process, host and id of the lock of a folder. The result is empty if there is none."""
    with suppress(OSError, ValueError):
        os.listdir(folder)  # refreshes an NFS client's cache of the folder
        return json.loads((folder / LOCK_NAME).read_bytes())
    return {}
