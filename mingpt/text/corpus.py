"""Text files -> vocabulary -> tokens, encoded once into a cache on disk.

The text is read twice, in chunks, so memory does not grow with its length. The first pass finds the distinct
characters, which are the vocabulary. The second pass writes the token of each character.
"""

import hashlib
import json
import os
import reprlib
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import fsspec
import numpy as np
from fsspec.callbacks import TqdmCallback
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.errors import UserError
from mingpt.files import make_folder, replace_file, replaced_file
from mingpt.monitoring.live_line import BAR_OPTIONS
from mingpt.monitoring.logging import logger
from mingpt.text.encoding import BEGINNINGS, HAS_NUL, explain_bytes

CHUNK_SIZE = 1 << 18  # characters per read; their arrays fit into the cache of a core
MAX_BYTES_IN_MEMORY = 1 << 28  # size of tokens that each process holds in memory; PyTorch itself takes 300 MB


@dataclass(frozen=True)
class Corpus:
    """An encoded text.

    Args:
        vocabulary: the distinct characters, sorted; the index of a character is its token
        tokens: (n,) unsigned integers, in memory, or memory-mapped if there are many
        sha256: SHA-256 of the text's bytes
    """

    vocabulary: str
    tokens: np.ndarray
    sha256: str


def encode(text: str, vocabulary: str, source: str) -> list[int]:
    """Returns the tokens of a short text, such as a prompt.

    Args:
        source: option or key of the text, for the message

    Raises:
        UserError: a character is not in the vocabulary.
    """
    unknown = set(text) - set(vocabulary)
    if unknown:
        raise UserError(
            f"{source}: {show_characters(unknown)} not in the training text's vocabulary, {show_characters(vocabulary)}"
        )
    return [vocabulary.index(character) for character in text]


def show_characters(characters: Collection[str]) -> str:
    """Formats distinct characters for a message: a few of them, and their number."""
    return f"{reprlib.repr(''.join(sorted(characters)))} ({len(characters):,} distinct)"


def check_text(path: str) -> None:
    """Raises a UserError if a path (a file, a glob or an fsspec URL) does not lead to a text."""
    if "://" in path:
        logger.info(f"asking for {path}")  # the answer of a server may take minutes
    _find_files(path)


def encode_corpus(
    path: str,
    cache_dir: Path,
    extra_characters: str = "",
    cache_key: str = "",
    is_ready: bool = False,
) -> Corpus:
    """Encodes a text into a cache, or opens the cache if file names, sizes and modification times have not changed.

    Args:
        path: file, glob or fsspec URL; for a URL, fsspec's `ukey` is compared
        cache_dir: folder of the cache
        extra_characters: characters to add to the vocabulary
        cache_key: identifies extra_characters; a cache with another key is not used
        is_ready: another process of this machine has just called this function, so a cache of this path is opened
            without looking at the text or checking the SHA-256 of the cache

    Raises:
        UserError: the text is missing, empty or not UTF-8, it changes during encoding, or the cache can't be written.
    """
    source = f"{path} and {cache_key}: "
    if is_ready and (corpus := _open_cache(cache_dir, source, verify=False)):
        return corpus
    fs, names = _find_files(path)
    identity = source + _identity(fs, names)
    corpus = _open_cache(cache_dir, identity, verify=True)
    if corpus is None:
        logger.info(f"encoding {path} into {cache_dir}, once")
        with tempfile.TemporaryDirectory() as folder:
            files = names
            if not isinstance(fs, LocalFileSystem):
                files = _download(fs, names, folder)
            corpus = _write_cache(path, files, identity, extra_characters, cache_dir)
    return corpus


# The files of the text


def _find_files(path: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """Returns the file system of a text, and the sorted names of its files."""
    try:
        fs, root = fsspec.url_to_fs(path)
        found = [root]
        if any(character in path for character in "*?[") and not fs.exists(root):
            found = sorted(fs.glob(root)) or [root]
        infos = [fs.info(name) for name in found]
    except Exception as error:  # each file system raises different exceptions
        raise UserError(
            f"data.path: {path} can't be read: {_reason(error)}; it may be a file, a glob, or a URL that fsspec knows"
        ) from error
    names = [info["name"] for info in infos if info["type"] == "file"]
    if not names:
        raise UserError(f"data.path: {path} is not a file; for all files of a folder write {path}/*.txt, in quotes")
    return fs, names


def _reason(error: Exception) -> str:
    """Returns the message of the server, if there is one: fsspec raises FileNotFoundError for any HTTP status."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


def _identity(fs: fsspec.AbstractFileSystem, names: Sequence[str]) -> str:
    """Returns a string that changes whenever one of the files changes."""
    if isinstance(fs, LocalFileSystem):
        return repr([(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in names])
    return repr([(name, fs.ukey(name)) for name in names])


def _download(fs: fsspec.AbstractFileSystem, names: Sequence[str], folder: str) -> list[str]:
    """Copies files from another machine into a folder, and returns the names of the copies."""
    copies = []
    for i, name in enumerate(names):
        copy = os.path.join(folder, f"{i}-{os.path.basename(name)}")
        bar = TqdmCallback(tqdm_kwargs={"desc": "fetching", "unit": "B", **BAR_OPTIONS})
        try:
            fs.get_file(name, copy, callback=bar)
        except Exception as error:  # each file system raises different exceptions
            raise UserError(
                f"data.path: {name} can't be fetched: {_reason(error)}; copy it here, or try again later"
            ) from error
        copies.append(copy)
    return copies


# The cache: an index, text.json, and the file of tokens that the index names


def _open_cache(cache_dir: Path, identity: str, verify: bool) -> Corpus | None:
    """Opens the cache of a text. Returns None if there is no cache, or if `verify` is set and the cache is damaged.

    Args:
        identity: identity of the text, or the beginning of it
    """
    try:
        index = json.loads((cache_dir / "text.json").read_bytes())
        if not index["identity"].startswith(identity):
            return None
        tokens = _load_tokens(cache_dir / index["file"], index["vocabulary"])
        is_damaged = verify and hashlib.sha256(tokens.data).hexdigest() != index["tokens_sha256"]
    except Exception:  # the index is missing, or damaged in any way
        return None
    if is_damaged:
        logger.warning(f"the text's cache in {cache_dir} is damaged: its bytes do not match their SHA-256")
        return None
    return Corpus(index["vocabulary"], tokens, index["sha256"])


def _load_tokens(file: Path, vocabulary: str) -> np.ndarray:
    """Reads the tokens. With a memory map, a change of the file would change them, and SIGBUS follows truncation."""
    tokens = np.asarray(np.memmap(file, _token_dtype(vocabulary), mode="r"))
    if tokens.nbytes <= MAX_BYTES_IN_MEMORY:
        return tokens.copy()
    return tokens  # the processes of a machine share the memory map


def _token_dtype(vocabulary: str) -> np.dtype:
    return np.min_scalar_type(len(vocabulary) - 1)


def _write_cache(path: str, files: Sequence[str], identity: str, extra_characters: str, cache_dir: Path) -> Corpus:
    """Encodes the text. A process that is killed before the end leaves the old cache and an unfinished file."""
    try:
        bytes_to_read = 2 * sum(map(os.path.getsize, files))  # there are two passes
        make_folder(cache_dir, "trainer.run_dir")
        for leftover in cache_dir.glob("*.tmp"):  # from a process that was killed
            leftover.unlink(missing_ok=True)
        with tqdm(desc="encoding", total=bytes_to_read, unit="B", **BAR_OPTIONS) as bar:
            vocabulary, sha256 = _find_vocabulary(files, extra_characters, bar)
            # Tokens depend on text and vocabulary. New ones get a new name, since text.json still names the old file.
            name = hashlib.sha256((sha256 + vocabulary).encode()).hexdigest()[:16]
            file = cache_dir / f"tokens-{name}.bin"
            with replaced_file(file) as opened:
                sha256_of_second_pass, tokens_sha256 = _write_tokens(files, vocabulary, opened, bar)
                if sha256_of_second_pass != sha256:  # there may be a character without a token
                    raise UserError(
                        f"data.path: {path} has changed while it was encoded; start again when it is complete"
                    )
        index = {
            "identity": identity,
            "vocabulary": vocabulary,
            "sha256": sha256,
            "file": file.name,
            "tokens_sha256": tokens_sha256,
        }
        replace_file(cache_dir / "text.json", json.dumps(index))
        for old in cache_dir.glob("tokens-*"):
            if old != file and old.suffix != ".tmp":  # another machine may be writing a .tmp
                old.unlink(missing_ok=True)
        return Corpus(vocabulary, _load_tokens(file, vocabulary), sha256)
    except OSError as error:
        raise UserError(
            f"data.path: {path} can't be encoded into {cache_dir}: {error}; make room there, or change permissions, "
            "or set another trainer.run_dir"
        ) from error


# The two passes


def _read(files: Sequence[str], bar: tqdm, digest: "hashlib._Hash") -> Iterator[np.ndarray]:
    """Yields the code points of the characters in chunks, (n,) uint32, and adds the bytes of the text to the digest."""
    is_empty = True
    for name in files:
        with open(name, encoding="utf-8-sig", newline="\n") as file:  # drops a byte-order mark
            start = file.buffer.peek()  # type: ignore[attr-defined]
            for mark, kind in BEGINNINGS.items():
                if start.startswith(mark):
                    raise UserError(f"data.path: {name} is {kind}")
            try:
                while text := file.read(CHUNK_SIZE):
                    is_empty = False
                    if "\0" in text:
                        raise UserError(f"data.path: {name} {HAS_NUL}")
                    # UTF-32 is an array of code points. NumPy is faster than a set or a dictionary of characters.
                    yield np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
                    chunk = text.encode()
                    digest.update(chunk)
                    bar.update(len(chunk))
            except UnicodeDecodeError as error:
                byte = file.buffer.tell() - len(error.object) + error.start  # type: ignore[attr-defined]
                raise UserError(
                    f"data.path: {name} is not UTF-8 text: byte {byte} is {error.object[error.start]:#04x}; "
                    f"{explain_bytes(name, byte)}"
                ) from error
    if is_empty:
        raise UserError(f"data.path: {files[0]} is empty; it must hold text: name another file")


def _find_vocabulary(files: Sequence[str], extra_characters: str, bar: tqdm) -> tuple[str, str]:
    """Returns the vocabulary and the SHA-256 of the text's bytes."""
    occurs = np.zeros(sys.maxunicode + 1, dtype=bool)  # the index is the code point
    occurs[list(map(ord, extra_characters))] = True
    digest = hashlib.sha256()
    for codes in _read(files, bar, digest):
        occurs[codes] = True
    return "".join(map(chr, np.flatnonzero(occurs))), digest.hexdigest()


def _write_tokens(files: Sequence[str], vocabulary: str, file: IO[bytes], bar: tqdm) -> tuple[str, str]:
    """Writes the tokens into an open file. Returns the SHA-256 of the text's bytes and of the tokens' bytes."""
    token_of_code = np.zeros(sys.maxunicode + 1, dtype=_token_dtype(vocabulary))
    token_of_code[list(map(ord, vocabulary))] = np.arange(len(vocabulary))
    digest = hashlib.sha256()
    tokens_digest = hashlib.sha256()
    for codes in _read(files, bar, digest):
        tokens = token_of_code.take(codes)
        file.write(tokens.data)
        tokens_digest.update(tokens.data)
    return digest.hexdigest(), tokens_digest.hexdigest()
