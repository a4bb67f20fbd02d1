"""Finds the files of a text, and decompresses and decodes them."""

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from glob import has_magic
from typing import IO

import fsspec
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from mingpt.errors import UserError


def find_files(path: str, key: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """Returns the file system of a path (a file, a glob or an fsspec URL), and the names of its files, sorted.

    Args:
        key: key or option of the path, for messages

    Raises:
        UserError: there is no such file, or it is a folder or a pipe.
    """
    with readable(path, key):
        fs, root = fsspec.url_to_fs(path)
        names = [root]
        if has_magic(path) and not fs.exists(root):
            # Like in a shell, a pattern matches hidden files only if it contains their dot.
            dots = f"/{root}".count("/.")
            names = sorted(name for name in fs.glob(root) if f"/{name}".count("/.") == dots) or [root]
        files = [name for name in names if fs.info(name)["type"] == "file"]
    if not files:
        raise UserError(
            f"{key}: {path} is a folder, a pipe or a device, but must be a file; to use all files of a folder, "
            f"write {path.rstrip('/')}/*.txt in quotes; write the text of a pipe to a file, since each start reads it"
        )
    return fs, files


@contextmanager
def readable(name: str, key: str) -> Iterator[None]:
    """Raises a UserError that names a file after an error in the block."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}: {name} is not UTF-8 text: {error.reason}, {error.object[error.start]:#04x}; `iconv -f ENCODING "
            "-t UTF-8` converts it; if it is compressed, its name must end in .gz, .bz2 or .xz"
        ) from error
    except Exception as error:  # each file system and each compression raises different exceptions
        cause = error.__cause__ or error  # fsspec raises FileNotFoundError for any HTTP status
        raise UserError(
            f"{key}: {name} can't be read: {type(cause).__name__}: {cause}; it must be a complete file, a glob or a "
            "URL for fsspec"
        ) from error


@contextmanager
def open_content(fs: fsspec.AbstractFileSystem, name: str) -> Iterator[IO[bytes]]:
    """Opens a file to read its bytes, decompressed if its name ends in .gz, .bz2 or .xz."""
    with ExitStack() as stack:
        if isinstance(fs, LocalFileSystem):
            content: IO[bytes] = stack.enter_context(open(name, "rb"))
        else:  # as a whole, since not all servers can send a part of a file
            content = io.BytesIO(fs.cat_file(name))
        compression = infer_compression(name.partition("?")[0])  # of a URL such as https://host/text.gz?download=1
        if compression is not None:
            content = stack.enter_context(compr[compression](content, mode="rb"))
        yield content


def check_plain(text: str, name: str, key: str) -> str:
    """Returns a text; raises a UserError if it is in UTF-16, whose ASCII characters are valid UTF-8."""
    if "\0" in text:
        raise UserError(
            f"{key}: {name} contains NUL characters, so it is not plain text; if it is UTF-16, "
            "`iconv -f UTF-16LE -t UTF-8` converts it"
        )
    return text
