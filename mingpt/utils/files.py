"""Files that are replaced as a whole, config.yaml, and folders of fsspec paths."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mingpt.utils.errors import UserError
from mingpt.utils.yaml_format import dump_yaml


def replace_file(file: Path, text: str) -> None:
    """Replaces a file's content: however the process or the machine stops, the file is the old or the new one.

    Raises:
        OSError: it can't be written.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(temporary, file)
    sync_folder(file.parent)


def sync_folder(folder: Path | str) -> None:
    """Flushes the names in a folder to disk, where the file system can: FUSE and CIFS may refuse it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def local_folder(path: str) -> Path | None:
    """The folder that an fsspec path names on this machine; None if it is on another file system, or fsspec fails."""
    try:
        fs, root = fsspec.url_to_fs(path)
    except Exception:  # each file system raises its own; who reads or writes the path reports it
        return None
    return Path(root) if isinstance(fs, LocalFileSystem) else None


def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Writes config.yaml, complete or not at all however the process ends; raises a UserError if that fails."""
    try:
        replace_file(run_dir / "config.yaml", dump_yaml(config))
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {run_dir}/config.yaml can't be written: {error.strerror}; make it writable, or "
            "set another"
        ) from error
