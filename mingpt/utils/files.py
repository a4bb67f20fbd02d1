"""The run folder's lock, and config.yaml."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mingpt.utils.errors import UserError
from mingpt.utils.yaml_format import dump_yaml

LOCK_TIMEOUT = 5.0  # seconds that another run has to exit


def lock_run_dir(run_dir: Path) -> int:
    """Locks the run folder until the file descriptor that it returns is closed.

    The lock is an abstract socket, which Linux frees however the process ends. It does not exclude other hosts: a lock
    file would, but would remain after the loss of a host.

    Raises:
        UserError: another process holds the lock, or the folder can't be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {run_dir} can't be made: {error.strerror}; set it to a folder that you may write to"
        ) from error
    folder, lock = run_dir.stat(), socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + LOCK_TIMEOUT
    while sys.platform == "linux":
        try:
            lock.bind(f"\0minGPT {folder.st_dev} {folder.st_ino}")
            break
        except OSError:
            if time.monotonic() > deadline:
                lock.close()
                raise UserError(
                    f"trainer.run_dir: another process is training in {run_dir}; wait for it, stop it, "
                    "or set another trainer.run_dir"
                ) from None
            time.sleep(0.1)
    return lock.detach()


def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Writes config.yaml, complete or not at all however the process ends; raises a UserError if that fails."""
    try:
        temporary = run_dir / "config.yaml.tmp"
        temporary.write_text(dump_yaml(config))
        os.replace(temporary, run_dir / "config.yaml")
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {run_dir}/config.yaml can't be written: {error.strerror}; make it writable, or "
            "set another"
        ) from error
