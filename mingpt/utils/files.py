"""Whose is a run folder, and what ran there?"""

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

LOCK_TIMEOUT = 5.0  # seconds for another run that was told to stop, and may be on its way out


def lock_run_dir(run_dir: Path, owner: object) -> None:
    """Keeps the run folder for as long as the owner lives: two runs in one would mix up their rows and snapshots.

    By an abstract socket, a name that Linux frees however the process ends. Of other machines it knows nothing: a lock
    in the folder would, and would outlive a lost machine for as long as a file server pleases.

    Raises:
        UserError: another process has it.
    """
    folder, name = run_dir.stat(), socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + LOCK_TIMEOUT
    while sys.platform == "linux":
        try:
            name.bind(f"\0minGPT {folder.st_dev} {folder.st_ino}")
            break
        except OSError:
            if time.monotonic() > deadline:
                name.close()
                raise UserError(
                    f"trainer.run_dir: another process is training in {run_dir}; wait for it, stop it, "
                    "or set another trainer.run_dir"
                ) from None
            time.sleep(0.1)
    weakref.finalize(owner, os.close, name.detach())


def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Writes config.yaml, whole or not at all.

    Raises:
        UserError: it can't be written.
    """
    try:
        beside = run_dir / "config.yaml.tmp"
        beside.write_text(yaml.safe_dump(config, sort_keys=False))
        os.replace(beside, run_dir / "config.yaml")
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {run_dir}/config.yaml can't be written: {error.strerror}; make it writable, or "
            "set another"
        ) from error
