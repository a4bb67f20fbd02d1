"""What is the text? Files -> vocabulary -> tokens, encoded once into a cache that all ranks map into memory."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from errors import UserError

CHUNK = 1 << 20  # bytes: stays in a core's own cache while it is decoded, looked up and written


@dataclass(frozen=True)
class Corpus:
    """An encoded text.

    Args:
        vocabulary: the distinct characters of the whole text, sorted; a character's index is its token
        tokens: (n,) the text as unsigned integers, mapped into memory
        sha256: digest of the text's bytes
    """

    vocabulary: str
    tokens: np.ndarray
    sha256: str


def encode_corpus(path: str, cache: Path) -> Corpus:
    """Encodes the text at `path` into the folder `cache`, or opens what is there if the text has not changed.

    Text counts as unchanged while names, sizes and modification times (for a URL, fsspec's `ukey`) are the same.

    Raises:
        UserError: text missing, empty or not UTF-8, or the cache can't be written.
    """
    fs, names, identity = _find_text(path)
    marker = cache / "text.json"
    try:
        return _open_cache(marker, identity)
    except (OSError, ValueError, KeyError):
        pass  # no cache yet, or of another text
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"trainer.run_dir: {cache} can't be made: {error}") from error
    try:
        for left in cache.glob("unfinished-*"):  # by a run that was killed here
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache) as folder:
            files = names if isinstance(fs, LocalFileSystem) else _fetch(fs, names, folder)
            with ThreadPoolExecutor(1) as beside:  # hashing leaves the interpreter's lock alone
                digest = beside.submit(_sha256, files)
                vocabulary = _distinct(files)
                if not vocabulary:
                    raise UserError(f"data.path: {path} is empty; it must hold text")
                unfinished = os.path.join(folder, "tokens.npy")
                _write_tokens(files, vocabulary, unfinished)
                sha256 = digest.result()
            tokens = cache / f"tokens-{sha256[:16]}.npy"
            os.replace(unfinished, tokens)
            meta = {"identity": identity, "vocabulary": vocabulary, "sha256": sha256, "tokens": tokens.name}
            Path(folder, "text.json").write_text(json.dumps(meta))
            os.replace(Path(folder, "text.json"), marker)
    except OSError as error:
        raise UserError(f"data.path: {path} can't be encoded into {cache}: {error}") from error
    for old in cache.glob("tokens-*.npy"):
        if old != tokens:
            old.unlink(missing_ok=True)
    return _open_cache(marker, identity)


def _open_cache(marker: Path, identity: str) -> Corpus:
    meta = json.loads(marker.read_text())
    if meta["identity"] != identity:
        raise ValueError("the text has changed since it was encoded")
    tokens = np.load(marker.parent / meta["tokens"], mmap_mode="r")
    return Corpus(meta["vocabulary"], np.asarray(tokens), meta["sha256"])


def _find_text(path: str) -> tuple[fsspec.AbstractFileSystem, list[str], str]:
    """The file system, the files in sorted order, and a string that changes when one of them does."""
    try:
        fs, root = fsspec.url_to_fs(path)
        names = sorted(fs.glob(root)) if any(c in path for c in "*?[") else [root]
        infos = [fs.info(name) for name in names]
    except FileNotFoundError:
        names = infos = []
    except Exception as error:  # each kind of store raises its own
        raise UserError(f"data.path: {path} can't be read: {error}") from error
    infos = [info for info in infos if info["type"] == "file"]
    if not infos:
        raise UserError(
            f"data.path: no text at {path} (working directory {os.getcwd()}); "
            "`python data/prepare.py` writes data/input.txt, the default"
        )
    names = [info["name"] for info in infos]
    if isinstance(fs, LocalFileSystem):
        return fs, names, repr([(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in names])
    return fs, names, repr([(name, fs.ukey(name)) for name in names])


def _fetch(fs: fsspec.AbstractFileSystem, names: Sequence[str], folder: str) -> list[str]:
    files = [os.path.join(folder, f"{i}.txt") for i in range(len(names))]
    for name, file in zip(names, files, strict=True):
        try:
            fs.get_file(name, file)
        except Exception as error:  # each kind of store raises its own
            raise UserError(f"data.path: {name} can't be fetched: {error}") from error
    return files


def _sha256(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for chunk, _, _ in _read(files):
        digest.update(chunk)
    return digest.hexdigest()


def _read(files: Sequence[str]) -> Iterator[tuple[bytes, str, bool]]:
    for name in files:
        with open(name, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                yield chunk, name, False
            yield b"", name, True


def _pieces(files: Sequence[str]) -> Iterator[bytes | np.ndarray]:
    """The text in pieces: bytes where a piece is pure ASCII, else its (n,) uint32 code points."""
    rest, done = b"", 0
    for chunk, name, last in _read(files):
        if not rest and chunk.isascii():
            piece: bytes | np.ndarray = chunk
            done += len(chunk)
        else:
            data = rest + chunk
            try:
                text, used = codecs.utf_8_decode(data, "strict", last)
            except UnicodeDecodeError as error:
                where = done + error.start
                raise UserError(
                    f"data.path: {name} is not UTF-8 text: byte {where} is {data[error.start]:#04x}"
                ) from error
            rest, done = data[used:], done + used
            piece = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        if len(piece):
            yield piece
        if last:
            rest, done = b"", 0


def _distinct(files: Sequence[str]) -> str:
    """The distinct characters of the text, sorted by code point."""
    ascii_seen = b""
    seen = np.zeros(0x110000, dtype=bool)
    for piece in _pieces(files):
        if isinstance(piece, bytes):
            ascii_seen += bytes(set(piece.translate(None, delete=ascii_seen)))
        elif not seen.take(piece).all():
            seen[piece] = True
    seen[list(ascii_seen)] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def _write_tokens(files: Sequence[str], vocabulary: str, target: str) -> None:
    """Writes the text as tokens into the .npy file `target` and flushes it to disk."""
    dtype = np.min_scalar_type(len(vocabulary) - 1)
    table = np.zeros(0x110000, dtype=dtype)
    table[[ord(c) for c in vocabulary]] = np.arange(len(vocabulary))
    ascii_table = table[:256].tobytes()
    count = 0
    with open(target, "wb") as file:
        # The header holds the length, known only at the end: numpy pads it, so that rewriting it keeps its size.
        np.lib.format.write_array_header_1_0(file, _header(dtype, 0))
        for piece in _pieces(files):
            if isinstance(piece, bytes) and dtype == np.uint8:
                file.write(piece.translate(ascii_table))
            else:
                codes = np.frombuffer(piece, dtype=np.uint8) if isinstance(piece, bytes) else piece
                file.write(table.take(codes).data)
            count += len(piece)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, _header(dtype, count))
        file.flush()
        os.fsync(file.fileno())


def _header(dtype: np.dtype, count: int) -> dict:
    return {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
