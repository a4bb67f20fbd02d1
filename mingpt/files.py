"""Files that are replaced as a whole."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replaced_file(path: Path | str, flush: bool = True) -> Iterator[IO[bytes]]:
    """Opens a temporary file for the block to write, and renames it to the path at the end.

    If the process or the machine stops at any moment, the path has either the complete old file or the complete new
    file. After an error in the block, it has the old one.

    Args:
        flush: whether to flush the file to disk; if not, it may be damaged when the machine stops

    Raises:
        OSError: the file can't be written.
    """
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"  # unique, because another process may write the same file
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


def replace_file(path: Path, text: str) -> None:
    """Replaces the content of a file by a text; raises an OSError if it can't be written."""
    with replaced_file(path) as file:
        file.write(text.encode())


def _sync_folder(folder: Path) -> None:
    """Flushes the file names of a folder to disk. FUSE and CIFS may refuse, which is ignored."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
