"""Text files -> vocabulary -> tokens, encoded once into a cache on disk.

The text is read twice, in chunks, so memory does not grow with it: the first pass finds the characters that occur,
which are the vocabulary, and the second looks up the token of each character and writes it.
"""

import codecs
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import fsspec
import numpy as np
from fsspec.callbacks import TqdmCallback
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.errors import UserError
from mingpt.files import replace_file, replaced_file
from mingpt.monitoring.live_line import BAR_OPTIONS
from mingpt.monitoring.logging import logger

CHUNK_SIZE = 1 << 18  # bytes that are read at once; the arrays made of them fit into a core's cache


@dataclass(frozen=True)
class Corpus:
    """An encoded text.

    Args:
        vocabulary: the distinct characters, sorted; a character's index is its token
        tokens: (n,) unsigned integers, mapped into memory
        sha256: digest of the text's bytes
    """

    vocabulary: str
    tokens: np.ndarray
    sha256: str


class DamagedCacheError(Exception):
    """The cached tokens are not those that were written."""


def encode(text: str, vocabulary: str, source: str) -> list[int]:
    """The tokens of a short text, such as a prompt.

    Args:
        source: the option or key that the text is from, for the message

    Raises:
        UserError: a character is not in the vocabulary.
    """
    unknown = sorted(set(text) - set(vocabulary))
    if unknown:
        raise UserError(
            f"{source}: {''.join(unknown)!r} not in the training text's vocabulary, which is {vocabulary!r}"
        )
    tokens = {character: token for token, character in enumerate(vocabulary)}
    return [tokens[character] for character in text]


def check_text(path: str) -> None:
    """Raises a UserError if there is no text at a path: file, glob or fsspec URL."""
    _find_files(path)


def count_characters(path: str) -> int | None:
    """Reads a text and returns its number of characters; None if it is on another machine, and is not read.

    Raises:
        UserError: the text is missing, empty or not UTF-8.
    """
    fs, names = _find_files(path)
    if not isinstance(fs, LocalFileSystem):
        return None
    with tqdm(desc="reading", total=sum(map(os.path.getsize, names)), unit="B", **BAR_OPTIONS) as bar:
        length = sum(len(codes) for _, codes in _read(names, bar))
    _check_not_empty(length, path)
    return length


def encode_corpus(
    path: str,
    cache_dir: Path,
    extra_characters: Callable[[], str] | None = None,
    cache_key: str = "",
    verify: bool = True,
) -> Corpus:
    """Encodes a text into a cache, or opens the cache while file names, sizes and modification times are the same.

    Args:
        path: file, glob or fsspec URL; for a URL, fsspec's `ukey` is compared
        cache_dir: folder of the cache
        extra_characters: returns characters that the vocabulary has besides those of the text; called only when the
            text is encoded
        cache_key: identifies extra_characters; a cache with another key is not used
        verify: whether to compare the cached tokens with their SHA-256, which one process per machine needs to do

    Raises:
        UserError: the text is missing, empty or not UTF-8, it changes meanwhile, or the cache can't be written.
    """
    fs, names = _find_files(path)
    identity = _identity(fs, names)
    if cache_key:
        identity += f" and {cache_key}"
    try:
        return _open_cache(cache_dir, identity, verify)
    except DamagedCacheError:
        logger.warning(f"the text's cache in {cache_dir} is damaged: its bytes do not match their SHA-256")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # there is no cache, or it is of another text, or its index is damaged
    extra = ""
    if extra_characters is not None:
        extra = extra_characters()
    logger.info(f"encoding {path} into {cache_dir}, once")
    _write_cache(path, fs, names, identity, extra, cache_dir)
    return _open_cache(cache_dir, identity, verify=False)


# The files of the text


def _find_files(path: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """Returns the file system of a text, and the sorted names of its files."""
    try:
        fs, root = fsspec.url_to_fs(path)
        found = [root]
        if any(character in path for character in "*?["):
            found = sorted(fs.glob(root))
        infos = [fs.info(name) for name in found]
    except FileNotFoundError:
        infos = []
    except Exception as error:  # each file system raises its own
        raise UserError(
            f"data.path: {path} can't be read: {error}; it may be a file, a glob, or a URL that fsspec knows"
        ) from error
    names = [info["name"] for info in infos if info["type"] == "file"]
    if not names and infos and found == [root]:
        raise UserError(f"data.path: {path} is a folder; for all its files write {path.rstrip('/')}/*.txt, in quotes")
    if not names:
        raise UserError(
            f"data.path: no text at {path} (working directory {os.getcwd()}); "
            "`python data/prepare.py` writes data/input.txt, the default"
        )
    return fs, names


def _identity(fs: fsspec.AbstractFileSystem, names: Sequence[str]) -> str:
    """Returns a string that changes when one of the files does."""
    if isinstance(fs, LocalFileSystem):
        return repr([(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in names])
    return repr([(name, fs.ukey(name)) for name in names])


def _download(fs: fsspec.AbstractFileSystem, names: Sequence[str], folder: str) -> list[str]:
    """Copies files of another machine into a folder, and returns the names of the copies."""
    copies = []
    for i, name in enumerate(names):
        copy = os.path.join(folder, f"{i}.txt")
        bar = TqdmCallback(tqdm_kwargs={"desc": "fetching", "unit": "B", **BAR_OPTIONS})
        try:
            fs.get_file(name, copy, callback=bar)
        except Exception as error:  # each file system raises its own
            raise UserError(f"data.path: {name} can't be fetched: {error}; copy it here, or try again later") from error
        copies.append(copy)
    return copies


# The cache: text.json, the index, and the file of tokens that it names


def _open_cache(cache_dir: Path, identity: str, verify: bool) -> Corpus:
    """Opens the cache of the text that has this identity.

    Raises:
        DamagedCacheError: `verify` is set, and the tokens do not match their SHA-256.
        ValueError: the cache is of another text.
    """
    index = json.loads((cache_dir / "text.json").read_text())
    if index["identity"] != identity:
        raise ValueError("the text has changed since it was encoded")
    file = cache_dir / index["tokens"]
    if verify and _sha256(file) != index["tokens_sha256"]:
        raise DamagedCacheError
    tokens = np.load(file, mmap_mode="r")
    return Corpus(index["vocabulary"], np.asarray(tokens), index["sha256"])


def _write_cache(
    path: str,
    fs: fsspec.AbstractFileSystem,
    names: Sequence[str],
    identity: str,
    extra_characters: str,
    cache_dir: Path,
) -> None:
    """Encodes the text. A process that is killed meanwhile leaves the cache as it was, and an unfinished file."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {cache_dir} can't be made: {error.strerror}; set it to a folder that you may write to"
        ) from error
    try:
        for leftover in cache_dir.glob("*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            files = names
            if not isinstance(fs, LocalFileSystem):
                files = _download(fs, names, folder)
            bytes_to_read = 2 * sum(os.path.getsize(file) for file in files)  # in two passes
            with tqdm(desc="encoding", total=bytes_to_read, unit="B", **BAR_OPTIONS) as bar:
                vocabulary, length, sha256 = _find_vocabulary(files, extra_characters, bar)
                _check_not_empty(length, path)
                # Tokens depend on both. Another name for other tokens: until text.json is replaced, it has the old one.
                name = hashlib.sha256((sha256 + vocabulary).encode()).hexdigest()[:16]
                tokens = cache_dir / f"tokens-{name}.npy"
                with replaced_file(tokens) as file:
                    sha256_of_second_pass = _write_tokens(files, vocabulary, length, file, bar)
                    if sha256_of_second_pass != sha256:  # it has no token for a character that it alone has seen
                        raise UserError(
                            f"data.path: {path} has changed while it was encoded; start again when it is complete"
                        )
            index = {
                "identity": identity,
                "vocabulary": vocabulary,
                "sha256": sha256,
                "tokens": tokens.name,
                "tokens_sha256": _sha256(tokens),
            }
            replace_file(cache_dir / "text.json", json.dumps(index))
        for old in cache_dir.glob("tokens-*.npy"):
            if old != tokens:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"data.path: {path} can't be encoded into {cache_dir}: {error}; make room there, or set another "
            "trainer.run_dir"
        ) from error


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while chunk := opened.read(CHUNK_SIZE):
            digest.update(chunk)
    return digest.hexdigest()


def _check_not_empty(characters: int, path: str) -> None:
    if characters == 0:
        raise UserError(f"data.path: {path} is empty; it must hold text: name another file")


# The two passes


def _read(files: Sequence[str], bar: tqdm) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yields the bytes of each chunk, and the code points, (n,) uint32, of the characters that end in it."""
    for name in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open(name, "rb") as file:
            is_end = False
            while not is_end:
                chunk = file.read(CHUNK_SIZE)
                is_end = not chunk
                try:
                    # The decoder keeps the first bytes of a character whose last ones are in the next chunk.
                    text = decoder.decode(chunk, final=is_end)
                except UnicodeDecodeError as error:
                    byte = file.tell() - len(error.object) + error.start
                    raise UserError(
                        f"data.path: {name} is not UTF-8 text: byte {byte} is {error.object[error.start]:#04x}; "
                        "convert it, as `iconv -f LATIN1 -t UTF-8` does from Latin-1"
                    ) from error
                # UTF-32 is the array of code points. numpy is faster than a set or a dictionary of characters.
                yield chunk, np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
                bar.update(len(chunk))


def _find_vocabulary(files: Sequence[str], extra_characters: str, bar: tqdm) -> tuple[str, int, str]:
    """Returns the vocabulary, the number of characters in the text, and the SHA-256 of its bytes."""
    occurs = np.zeros(sys.maxunicode + 1, dtype=bool)  # by code point
    for character in extra_characters:
        occurs[ord(character)] = True
    length = 0
    digest = hashlib.sha256()
    for chunk, codes in _read(files, bar):
        occurs[codes] = True
        length += len(codes)
        digest.update(chunk)
    vocabulary = "".join(chr(code) for code in np.flatnonzero(occurs))
    return vocabulary, length, digest.hexdigest()


def _write_tokens(files: Sequence[str], vocabulary: str, length: int, file: IO[bytes], bar: tqdm) -> str:
    """Writes the tokens into an open .npy file, and returns the SHA-256 of the text's bytes."""
    dtype = np.min_scalar_type(len(vocabulary) - 1)
    token_of_code = np.zeros(sys.maxunicode + 1, dtype=dtype)
    for token, character in enumerate(vocabulary):
        token_of_code[ord(character)] = token
    digest = hashlib.sha256()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    # Not open_memmap: on a full disk, writing into mapped memory ends the process by SIGBUS.
    np.lib.format.write_array_header_1_0(file, header)
    for chunk, codes in _read(files, bar):
        file.write(token_of_code.take(codes).data)
        digest.update(chunk)
    return digest.hexdigest()
