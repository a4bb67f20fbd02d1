"""Reads text files into memory as tokens, in one pass."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.errors import UserError
from mingpt.monitoring.live_line import BAR_OPTIONS
from mingpt.monitoring.logging import logger
from mingpt.text.tokenizer import Tokenizer

CHUNK_SIZE = 1 << 18  # characters per read; their arrays fit into the cache of a core
DECOMPRESSORS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Corpus:
    """An encoded text.

    Args:
        tokenizer: encodes and decodes the text
        tokens: (n,) unsigned integers, one byte each for a vocabulary of up to 256 tokens
        sha256: SHA-256 of the text's bytes
    """

    tokenizer: Tokenizer
    tokens: np.ndarray
    sha256: str


def check_text(path: str) -> None:
    """Raises a UserError if a path (a file, a glob or an fsspec URL) does not lead to a text."""
    if "://" in path:
        logger.info(f"requesting {path}")  # a server may take minutes to answer
    _find_files(path)


def read_corpus(path: str, tokenizer: Tokenizer, verbose: bool = True) -> Corpus:
    """Reads and encodes a text.

    Args:
        path: file, glob or fsspec URL
        tokenizer: learns the tokens that it does not know
        verbose: show the progress, and warn about an HTML page

    Raises:
        UserError: the text is missing, unreadable, empty or not UTF-8.
    """
    fs, files = _find_files(path)
    size = sum(file.get("size") or 0 for file in files)
    bar_options = BAR_OPTIONS if verbose else {"disable": True}
    digest = hashlib.sha256()
    dtype = np.dtype(np.uint8)
    content = bytearray()  # the bytes of all tokens; unlike an array, it grows in place
    with tqdm(desc="reading", total=size or None, unit="B", **bar_options) as bar:
        for text in _read(fs, files):
            if verbose and not content and text.lstrip().lower().startswith(("<!doctype html", "<html")):
                logger.warning(
                    f"data.path: {path} is an HTML page, so its tags become part of the text; use a plain text instead"
                )
            chunk = text.encode()
            digest.update(chunk)
            bar.update(len(chunk))
            new_tokens = tokenizer.learn(text)
            if (needed := np.min_scalar_type(len(tokenizer.vocabulary) - 1)) != dtype:
                content = bytearray(np.frombuffer(content, dtype).astype(needed).data)
                dtype = needed
            content += new_tokens.astype(dtype).data
    if not content:
        raise UserError(f"data.path: {path} is empty; name a file that contains text")

    sorted_tokens = tokenizer.sort().astype(dtype)
    tokens = np.frombuffer(content, dtype)
    for start in range(0, len(tokens), CHUNK_SIZE):
        part = tokens[start : start + CHUNK_SIZE]
        part[:] = sorted_tokens.take(part)
    return Corpus(tokenizer, tokens, digest.hexdigest())


def _find_files(path: str) -> tuple[fsspec.AbstractFileSystem, list[dict[str, Any]]]:
    """Returns the file system of a text, and its information about each file, such as the size, sorted by name."""
    try:
        fs, root = fsspec.url_to_fs(path)
        names = [root]
        if has_magic(path) and not fs.exists(root):
            # Like in a shell, a pattern matches hidden files only if it contains their dot.
            dots = f"/{root}".count("/.")
            names = sorted(name for name in fs.glob(root) if f"/{name}".count("/.") == dots) or [root]
        found = [fs.info(name) for name in names]
    except Exception as error:  # each file system raises different exceptions
        raise UserError(
            f"data.path: {path} can't be read: {_reason(error)}; it must be a file, a glob or a URL for fsspec"
        ) from error
    files = [info for info in found if info["type"] == "file"]
    if not files:
        raise UserError(
            f"data.path: {path} is a folder, a pipe or a device, but must be a file; to use all files of a folder, "
            f"write {path.rstrip('/')}/*.txt in quotes; write the text of a pipe to a file, since each start reads it"
        )
    return fs, files


def _reason(error: Exception) -> str:
    """Returns the server's message, if there is one, since fsspec raises FileNotFoundError for any HTTP status."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


def _read(fs: fsspec.AbstractFileSystem, files: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the characters of the files in chunks."""
    for name in [file["name"] for file in files]:
        try:
            # A remote file is fetched as a whole, since not all servers can send a part of it.
            source = io.FileIO(name) if isinstance(fs, LocalFileSystem) else io.BytesIO(fs.cat_file(name))
            path = name.partition("?")[0]  # of a URL such as https://host/text.gz?download=1
            open_content = DECOMPRESSORS.get(os.path.splitext(path)[1], io.BufferedReader)
            with source, open_content(source) as content:
                yield from _decode(content, name)
        except UserError:
            raise
        except Exception as error:  # each file system and each compression raises different exceptions
            raise UserError(
                f"data.path: {name} can't be read: {_reason(error)}; make sure that it is complete and readable"
            ) from error


def _decode(content: io.BufferedReader, name: str) -> Iterator[str]:
    """Yields the characters of a file in chunks, without a byte-order mark."""
    with io.TextIOWrapper(content, encoding="utf-8-sig", newline="\n") as file:
        try:
            while text := file.read(CHUNK_SIZE):
                if "\0" in text:
                    raise UserError(
                        f"data.path: {name} contains NUL characters, so it is not plain text; if it is UTF-16, "
                        "`iconv -f UTF-16LE -t UTF-8` converts it"
                    )
                yield text
        except UnicodeDecodeError as error:
            byte = content.tell() - len(error.object) + error.start
            raise UserError(
                f"data.path: {name} is not UTF-8 text: byte {byte} is {error.object[error.start]:#04x}; `iconv -f "
                "ENCODING -t UTF-8` converts it; if it is compressed, its name must end in .gz, .bz2 or .xz"
            ) from error
