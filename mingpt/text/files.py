"""Finds the files of a text."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from fsspec.core import OpenFile

from mingpt.errors import UserError


def find_files(path: str, key: str) -> list[OpenFile]:
    """Returns the files of a path (a file, a pattern with *, or an fsspec URL), sorted by name.

    They open as text without a byte-order mark, and decompressed if their names end in .gz, .bz2 or .xz.

    Args:
        key: key or option of the path, for messages

    Raises:
        UserError: there is no such file, or it is a folder or a pipe.
    """
    # Not all HTTP servers can send a part of a file; with 0, files are streams.
    options = {"block_size": 0} if path.startswith("http") else {}
    with readable(path, key):
        files = fsspec.open_files(path, "r", compression="infer", encoding="utf-8-sig", newline="\n", **options)
        files = [file for file in files if file.fs.info(file.path)["type"] == "file"]
    if not files:
        raise UserError(
            f"{key}: {path} is no file, and no finished folder of data/prepare.py; to use all files of a folder, write "
            "FOLDER/*.txt in quotes"
        )
    return files


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
