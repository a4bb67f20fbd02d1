"""Finds and opens the files of a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic

import fsspec
from fsspec.core import OpenFile
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
        # Not all HTTP servers can send a part of a file; with 0, files are streams.
        options = {"block_size": 0} if path.startswith("http") else {}
        fs, root = fsspec.url_to_fs(path, **options)
        names = [root]
        if has_magic(path) and not fs.exists(root):
            # Like in a shell, a pattern matches hidden files only if it contains their dot.
            dots = f"/{root}".count("/.")
            names = sorted(name for name in fs.glob(root) if f"/{name}".count("/.") == dots) or [root]
        files = [name for name in names if fs.info(name)["type"] == "file"]
    if not files:
        raise UserError(
            f"{key}: {path} is no file; to use all files of a folder, write {path.rstrip('/')}/*.txt in quotes"
        )
    return fs, files


@contextmanager
def readable(name: str, key: str) -> Iterator[None]:
    """Raises a UserError after an error in the block, which reads a file."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}: {name} is not UTF-8 text: {error}; `iconv -f ENCODING -t UTF-8` converts it; if it is compressed, "
            "its name must end in .gz, .bz2 or .xz"
        ) from error
    except ImportError as error:
        raise UserError(f"{key}: {name} can't be read: {error}; run `pip install {error.name}`") from error
    except Exception as error:  # each file system and each library raises different exceptions
        cause = error.__cause__ or error  # fsspec raises FileNotFoundError for any HTTP status
        raise UserError(f"{key}: {name} can't be read: {type(cause).__name__}: {cause}") from error


def open_text(fs: fsspec.AbstractFileSystem, name: str) -> OpenFile:
    """Opens a file as text, without a byte-order mark. It is decompressed if its name ends in .gz, .bz2 or .xz."""
    compression = infer_compression(without_query(name))
    return OpenFile(fs, name, "r", compression=compression, encoding="utf-8-sig", newline="\n")


def without_query(name: str) -> str:
    """Returns a name that ends in its suffix, also for a URL such as https://host/text.gz?download=true."""
    return name.partition("?")[0]
