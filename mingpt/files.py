"""Regular files, files that are replaced as a whole, and folders."""

import errno
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mingpt.errors import UserError


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


def make_folder(folder: Path, key: str) -> None:
    """Makes a folder and its parents where they are missing; raises a UserError with the key of the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error.strerror
        if os.path.islink(error.filename):  # the system's message is that it exists
            problem = f"it is a link to {os.readlink(error.filename)}, which is no folder"
        raise UserError(
            f"{key}: {error.filename} can't be created: {problem}; set it to a folder that you may write to"
        ) from error


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
