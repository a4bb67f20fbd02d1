"""The run folder's lock, and config.yaml."""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import yaml

from mingpt.utils.errors import UserError

LOCK_TIMEOUT = 5.0  # seconds to wait for another run, which may be about to exit


def lock_run_dir(run_dir: Path, owner: object) -> None:
    """Locks the run folder for as long as `owner` lives: two runs in one folder would mix up rows and snapshots.

    The lock is an abstract socket, a name that Linux frees however the process ends. It does not exclude other hosts.
    A lock file would, but after the loss of a host it would remain.

    Raises:
        UserError: another process holds the lock.
    """
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
    weakref.finalize(owner, os.close, lock.detach())


def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Writes config.yaml; it is complete or absent, however the process ends.

    Raises:
        UserError: it can't be written.
    """
    try:
        temporary = run_dir / "config.yaml.tmp"
        temporary.write_text(yaml.safe_dump(config, sort_keys=False))
        os.replace(temporary, run_dir / "config.yaml")
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {run_dir}/config.yaml can't be written: {error.strerror}; make it writable, or "
            "set another"
        ) from error
