"""Text files -> vocabulary -> tokens, encoded once into a cache, which is mapped into memory."""

import codecs
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import fsspec
import numpy as np
from fsspec.callbacks import TqdmCallback
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.utils.errors import UserError
from mingpt.utils.file_systems import open_file_system
from mingpt.utils.files import replace_file
from mingpt.utils.logging import logger
from mingpt.utils.progress import BAR_OPTIONS

CHUNK_SIZE = 1 << 17  # bytes: fits a core's cache while it is decoded, looked up and written
FIRST_CHUNKS = 16  # searched for characters before tokens are assigned, so that a small text need not be renumbered


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
    """The tokens of a text.

    Args:
        source: the option or key that the text is from, for the message

    Raises:
        UserError: a character is not in the vocabulary.
    """
    tokens = {character: token for token, character in enumerate(vocabulary)}
    if unknown := sorted(set(text) - set(vocabulary)):
        raise UserError(
            f"{source}: {''.join(unknown)!r} not in the training text's vocabulary, which is {vocabulary!r}"
        )
    return [tokens[character] for character in text]


def check_text(path: str) -> None:
    """Raises a UserError if there is no text at a path: file, glob or fsspec URL."""
    with ExitStack() as stack:
        _find_files(path, stack)


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
        UserError: the text is missing, empty or not UTF-8, or the cache can't be written.
    """
    with ExitStack() as stack:
        fs, names, identity = _find_files(path, stack)
        return _encode(path, fs, names, identity, cache_dir, extra_characters, cache_key, verify)


def _encode(
    path: str,
    fs: fsspec.AbstractFileSystem,
    names: Sequence[str],
    identity: str,
    cache_dir: Path,
    extra_characters: Callable[[], str] | None,
    cache_key: str,
    verify: bool,
) -> Corpus:
    if cache_key:
        identity += f" and {cache_key}"
    index = cache_dir / "text.json"
    try:
        return _open_cache(index, identity, verify)
    except DamagedCacheError:
        logger.warning(f"the text's cache in {cache_dir} is damaged: its bytes do not match their SHA-256")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # there is no cache, or it is of another text, or its index is damaged
    extra_codes = [ord(character) for character in extra_characters()] if extra_characters else []
    logger.info(f"encoding {path} into {cache_dir}, once")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {cache_dir} can't be made: {error.strerror}; set it to a folder that you may write to"
        ) from error
    try:
        for leftover in cache_dir.glob("unfinished-*"):  # of a process that was killed
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache_dir) as folder:
            files = names if isinstance(fs, LocalFileSystem) else _download(fs, names, folder)
            with ThreadPoolExecutor(1) as pool:  # hashlib releases the interpreter's lock
                digest = pool.submit(_sha256, files)
                unfinished = os.path.join(folder, "tokens.npy")
                with tqdm(desc="encoding", total=sum(map(os.path.getsize, files)), unit="B", **BAR_OPTIONS) as bar:
                    vocabulary = _write_tokens(files, unfinished, bar, extra_codes)
                if not vocabulary:
                    raise UserError(f"data.path: {path} is empty; it must hold text: name another file")
                sha256 = digest.result()
            name = hashlib.sha256((sha256 + vocabulary).encode()).hexdigest()[:16]  # tokens depend on both
            tokens = cache_dir / f"tokens-{name}.npy"
            tokens_sha256 = _sha256([unfinished])
            os.replace(unfinished, tokens)
            meta = {
                "identity": identity,
                "vocabulary": vocabulary,
                "sha256": sha256,
                "tokens": tokens.name,
                "tokens_sha256": tokens_sha256,
            }
            replace_file(index, json.dumps(meta))
    except OSError as error:
        raise UserError(
            f"data.path: {path} can't be encoded into {cache_dir}: {error}; make room there, or set another "
            "trainer.run_dir"
        ) from error
    for old in cache_dir.glob("tokens-*.npy"):
        if old != tokens:
            old.unlink(missing_ok=True)
    return _open_cache(index, identity, verify=False)


def _open_cache(index: Path, identity: str, verify: bool) -> Corpus:
    meta = json.loads(index.read_text())
    if meta["identity"] != identity:
        raise ValueError("the text has changed since it was encoded")
    file = index.parent / meta["tokens"]
    if verify and _sha256([str(file)]) != meta["tokens_sha256"]:
        raise DamagedCacheError
    tokens = np.load(file, mmap_mode="r")
    return Corpus(meta["vocabulary"], np.asarray(tokens), meta["sha256"])


def _find_files(path: str, stack: ExitStack) -> tuple[fsspec.AbstractFileSystem, list[str], str]:
    """Returns the file system, the sorted names, and a string that changes when a file does.

    The file system is usable until `stack` is closed.
    """
    try:
        fs, root = stack.enter_context(open_file_system(path))
        names = sorted(fs.glob(root)) if any(c in path for c in "*?[") else [root]
        infos = [fs.info(name) for name in names]
    except FileNotFoundError:
        infos = []
    except Exception as error:  # each file system raises its own
        raise UserError(
            f"data.path: {path} can't be read: {error}; it may be a file, a glob, or a URL that fsspec knows"
        ) from error
    names = [info["name"] for info in infos if info["type"] == "file"]
    if not names:
        raise UserError(
            f"data.path: no text at {path} (working directory {os.getcwd()}); "
            "`python data/prepare.py` writes data/input.txt, the default"
        )
    if isinstance(fs, LocalFileSystem):
        return fs, names, repr([(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in names])
    return fs, names, repr([(name, fs.ukey(name)) for name in names])


def _download(fs: fsspec.AbstractFileSystem, names: Sequence[str], folder: str) -> list[str]:
    files = [os.path.join(folder, f"{i}.txt") for i in range(len(names))]
    for name, file in zip(names, files, strict=True):
        try:
            fs.get_file(name, file, callback=TqdmCallback(tqdm_kwargs={"desc": "fetching", "unit": "B", **BAR_OPTIONS}))
        except Exception as error:  # each file system raises its own
            raise UserError(f"data.path: {name} can't be fetched: {error}; copy it here, or try again later") from error
    return files


def _sha256(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in files:
        with open(name, "rb", buffering=0) as file:
            while chunk := file.read(32 * CHUNK_SIZE):  # few iterations: each one takes the interpreter's lock
                digest.update(chunk)
    return digest.hexdigest()


def _decode(files: Sequence[str], bar: tqdm) -> Iterator[bytes | np.ndarray]:
    """Yields the text's code points in pieces: bytes if all are below 256, else (n,) uint32."""
    for name in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open(name, "rb", buffering=0) as file:
            chunk = None
            while chunk != b"":
                chunk = file.read(CHUNK_SIZE)
                bar.update(len(chunk))
                piece: bytes | np.ndarray = chunk
                incomplete, _ = decoder.getstate()  # a character whose end is in the next chunk
                if incomplete or not chunk.isascii():
                    try:
                        text = decoder.decode(chunk, final=not chunk)
                    except UnicodeDecodeError as error:
                        byte = file.tell() - len(error.object) + error.start
                        raise UserError(
                            f"data.path: {name} is not UTF-8 text: byte {byte} is {error.object[error.start]:#04x}; "
                            "convert it, as `iconv -f LATIN1 -t UTF-8` does from Latin-1"
                        ) from error
                    try:
                        piece = text.encode("latin-1")
                    except UnicodeEncodeError:
                        piece = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
                if len(piece):
                    yield piece


def _add_codes(piece: bytes | np.ndarray, codes: set[int]) -> None:
    if isinstance(piece, bytes):
        for part in (piece[:4096], piece):  # updating a set is slow: what is known is removed from the bytes before
            codes.update(part.translate(None, delete=bytes(code for code in codes if code < 256)))
    else:
        codes.update(np.flatnonzero(np.bincount(piece)).tolist())


def _lookup_table(order: Sequence[int]) -> np.ndarray:
    """Maps each number in `order` to its index there, and all others to the maximum of the narrowest dtype."""
    dtype = np.min_scalar_type(len(order) - 1)
    table = np.full(max(255, *order) + 2, np.iinfo(dtype).max, dtype=dtype)
    table[order] = np.arange(len(order))
    return table


def _look_up(piece: bytes | np.ndarray, table: np.ndarray) -> np.ndarray:
    if isinstance(piece, bytes) and table.dtype == np.uint8:
        return np.frombuffer(piece.translate(table[:256].tobytes()), dtype=np.uint8)
    codes = np.frombuffer(piece, dtype=np.uint8) if isinstance(piece, bytes) else piece
    return table.take(codes, mode="clip")  # larger codes get the last entry, that of unknown ones


def _write_tokens(files: Sequence[str], target: str, bar: tqdm, known_codes: Sequence[int]) -> str:
    """Writes the text as tokens into the .npy file `target`, flushes it to disk and returns the vocabulary.

    The text is decoded once. A character that first occurs after the first chunks gets the next token, and the tokens
    are renumbered at the end. The vocabulary includes `known_codes`.
    """
    bar.update(-bar.n)  # unlike reset(), shows nothing
    pieces = _decode(files, bar)
    first = list(itertools.islice(pieces, FIRST_CHUNKS))
    codes, count = set(known_codes), 0
    for piece in first:
        _add_codes(piece, codes)
    if not first:
        return ""
    table = _lookup_table(order := sorted(codes))
    unknown = np.iinfo(table.dtype).max
    with open(target, "w+b") as file:
        # The header holds the length, which is known at the end: numpy pads the header, so rewriting keeps its size.
        np.lib.format.write_array_header_1_0(file, _header(table.dtype, 0))
        start = file.tell()
        for piece in itertools.chain(first, pieces):
            tokens = _look_up(piece, table)
            if unknown in tokens:  # it is also the last character's token if the dtype is just wide enough
                _add_codes(piece, codes)
                if len(codes) > unknown + 1:
                    file.close()  # its buffer would be written over the new tokens
                    return _write_tokens(files, target, bar, sorted(codes))
                table = _lookup_table(order := order + sorted(codes.difference(order)))
                tokens = _look_up(piece, table)
            file.write(tokens.data)
            count += len(tokens)
        if order != sorted(order):
            _renumber(file, start, _lookup_table(np.argsort(order).tolist()))
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, _header(table.dtype, count))
        file.flush()
        os.fsync(file.fileno())
    return "".join(map(chr, sorted(order)))


def _renumber(file: BinaryIO, start: int, table: np.ndarray) -> None:
    """Replaces each token from byte `start` on by its entry in `table`."""
    file.seek(start)
    while data := file.read(CHUNK_SIZE * table.itemsize):
        file.seek(-len(data), os.SEEK_CUR)
        file.write(_look_up(data if table.itemsize == 1 else np.frombuffer(data, dtype=table.dtype), table).data)


def _header(dtype: np.dtype, count: int) -> dict:
    return {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
