"""Regular files, files that are replaced as a whole, config.yaml, and this machine's folders behind fsspec's paths."""

import errno
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mingpt.errors import UserError
from mingpt.yaml_format import dump_yaml


def open_regular(path: Path | str) -> IO[bytes]:
    """Opens a file for reading, but no pipe, which may have no writer, and no device, which may have no end.

    Raises:
        OSError: it can't be read, or is no regular file.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ENOTSUP, "It is no regular file", str(path))
    return file


def read_regular(path: Path | str) -> bytes:
    """The content of a regular file; raises an OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


@contextmanager
def replaced_file(path: Path | str, flush: bool = True) -> Iterator[IO[bytes]]:
    """Context manager that replaces a file by what the block writes into the open file that it gives.

    However the process or the machine stops, the file is the old or the new one; after an error it is the old one.

    Args:
        flush: write the file to disk. Otherwise it may be damaged after the machine stops.

    Raises:
        OSError: it can't be written.
    """
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"  # of its own, since another process may write the same file
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if flush:
        _sync_folder(Path(path).parent)


def check_temporary_folder() -> None:
    """Raises a UserError if there is no folder for temporary files: `torch.optim` asks for it, also without compile."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(f"environment: {error.strerror}; set TMPDIR to a folder that can be written") from error


def replace_file(path: Path, text: str) -> None:
    """Replaces a file by a text; raises an OSError if it can't be written."""
    with replaced_file(path) as file:
        file.write(text.encode())


def _sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk, where the file system can: FUSE and CIFS may refuse it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def local_folder(path: str) -> Path | None:
    """The folder that an fsspec path names on this machine; None if it is on another file system, or fsspec fails."""
    import fsspec  # noqa: PLC0415 - slow, and `--help` needs none of it
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

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
