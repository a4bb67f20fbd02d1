"""Locks of folders: one run at a time writes to a folder, on one host or several that share it."""

import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mingpt.config import TrainerConfig
from mingpt.errors import UserError
from mingpt.files import local_folder
from mingpt.monitoring.logging import logger

LOCK_NAME = ".lock"
LOCK_TIMEOUT = 5.0  # seconds that another run on this host has to exit
RETRY_SECONDS = 0.1


def lock_run(config: TrainerConfig) -> list[int]:
    """Locks the run folder and the folder of its snapshots, if that is on this machine; returns file descriptors.

    Raises:
        UserError: another process holds a lock, or a folder can't be written.
    """
    run_dir = Path(config.run_dir)
    keys = {run_dir: "trainer.run_dir"}
    if config.snapshot_path is None:
        keys[run_dir / "snapshots"] = "trainer.run_dir"
    elif (folder := local_folder(config.snapshot_path)) is not None:
        keys[folder] = "trainer.snapshot_path"
    return [lock_folder(folder, key) for folder, key in keys.items()]


def lock_folder(folder: Path, key: str) -> int:
    """Locks a folder until the file descriptor that it returns is closed, as it is when the process ends.

    The lock is a `flock` on a file in the folder, which excludes other containers, and other hosts where the file
    system supports it. An NFS server keeps the lock of a host that is lost for 90 seconds (the default lease of Linux's
    server); other file systems may keep it for ever.

    Args:
        key: configuration key that names the folder, for messages

    Raises:
        UserError: another process holds the lock, or the folder can't be written.
    """
    file = folder / LOCK_NAME
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        descriptor = _open(file, key)
        if _try_lock(descriptor, file):
            holder = {"process": os.getpid(), "host": platform.node()}
            with suppress(OSError):  # a full disk: the lock holds nevertheless
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            return descriptor
        holder = _read_holder(descriptor)
        os.close(descriptor)
        if time.monotonic() > deadline:
            process = f"process {holder['process']}" if holder else "another process"
            hint = ""
            if holder and holder["host"] != platform.node():
                process += f" on {holder['host']}"
                hint = f" (if that host is lost, delete {file})"
            raise UserError(
                f"{key}: {process} is training in {folder}{hint}; wait for it, stop it, or set another {key}"
            )
        time.sleep(RETRY_SECONDS)


def _open(file: Path, key: str) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"{key}: {error.filename} can't be written: {error.strerror}; set it to a folder that you may write to"
        ) from error


def _try_lock(descriptor: int, file: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(f"{file} can't be locked: {error.strerror}; make sure that no other process trains there")
    # The folder may have been deleted between opening the file and locking it.
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    return False


def _read_holder(descriptor: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return json.loads(os.pread(descriptor, 1000, 0))
    return {}
