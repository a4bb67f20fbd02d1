"""Files that are replaced as a whole, config.yaml, and the file systems behind paths and URLs, which fsspec opens."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mingpt.errors import UserError
from mingpt.yaml_format import dump_yaml

CACHING = ("simplecache", "filecache", "blockcache", "cached")  # protocols, as in simplecache::s3://bucket/text.txt


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


@contextmanager
def open_file_system(path: str) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """Context manager that gives the file system of a path or URL, and the path in it.

    Copies that `simplecache::` and the like make last as long as the context, unless fsspec's own configuration names
    a folder for them. fsspec would remove them when the interpreter exits, which main.py does not wait for.
    """
    protocols = path.split("::")[:-1]
    caching = [name for name in protocols if name in CACHING and name not in fsspec.config.conf]
    if not caching:
        yield fsspec.url_to_fs(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield fsspec.url_to_fs(path, **{name: {"cache_storage": folder} for name in caching})
