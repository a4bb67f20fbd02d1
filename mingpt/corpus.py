"""What is the text? Files -> vocabulary -> tokens, encoded once into a cache that all ranks map into memory."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import fsspec
import numpy as np
from fsspec.callbacks import TqdmCallback
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.snapshot.pretrained import load_pretrained
from mingpt.utils.errors import UserError
from mingpt.utils.progress import BAR_OPTIONS, Say, nothing

CHUNK = 1 << 17  # bytes: stays in a core's own cache while it is decoded, looked up and written
FIRST = 16  # chunks: searched for characters before any is numbered, so that a small text need not be renumbered


@dataclass(frozen=True)
class Corpus:
    """An encoded text.

    Args:
        vocabulary: the distinct characters of the whole text, and of the model that training starts from, sorted; a
            character's index is its token
        tokens: (n,) the text as unsigned integers, mapped into memory
        sha256: digest of the text's bytes
    """

    vocabulary: str
    tokens: np.ndarray
    sha256: str


def encode_corpus(path: str, cache: Path, init_from: str | None = None, say: Say = nothing) -> Corpus:
    """Encodes the text at `path` into the folder `cache`, or opens what is there if the text has not changed.

    Text counts as unchanged while names, sizes and modification times (for a URL, fsspec's `ukey`) are the same.

    Args:
        path: the text
        cache: the folder
        init_from: the model that training starts from, whose characters stay in the vocabulary; None: the text's alone
        say: is told of what may take long

    Raises:
        UserError: text or model missing, text empty or not UTF-8, or the cache can't be written.
    """
    fs, names, identity = _find_text(path)
    if init_from is not None:
        identity += f" and {init_from}"
    marker = cache / "text.json"
    try:
        return _open_cache(marker, identity)
    except (OSError, ValueError, KeyError):
        pass  # no cache yet, or of another text
    known = (
        () if init_from is None else [ord(c) for c in load_pretrained(init_from, "trainer.init_from", say).vocabulary]
    )
    say(f"encoding {path} into {cache}, once")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {cache} can't be made: {error.strerror}; set it to a folder that you may write to"
        ) from error
    try:
        for left in cache.glob("unfinished-*"):  # by a run that was killed here
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache) as folder:
            files = names if isinstance(fs, LocalFileSystem) else _fetch(fs, names, folder)
            with ThreadPoolExecutor(1) as beside:  # hashing leaves the interpreter's lock alone
                digest = beside.submit(_sha256, files)
                unfinished = os.path.join(folder, "tokens.npy")
                size = sum(os.path.getsize(name) for name in files)
                with tqdm(desc="encoding", total=size, unit="B", **BAR_OPTIONS) as bar:
                    vocabulary = _write_tokens(files, unfinished, bar, known)
                if not vocabulary:
                    raise UserError(f"data.path: {path} is empty; it must hold text: name another file")
                sha256 = digest.result()
            tokens = cache / f"tokens-{sha256[:16]}.npy"
            os.replace(unfinished, tokens)
            meta = {"identity": identity, "vocabulary": vocabulary, "sha256": sha256, "tokens": tokens.name}
            Path(folder, "text.json").write_text(json.dumps(meta))
            os.replace(Path(folder, "text.json"), marker)
    except OSError as error:
        raise UserError(
            f"data.path: {path} can't be encoded into {cache}: {error}; make room there, or set another trainer.run_dir"
        ) from error
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
        raise UserError(
            f"data.path: {path} can't be read: {error}; it may be a file, a glob, or a URL that fsspec knows"
        ) from error
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
            fs.get_file(name, file, callback=TqdmCallback(tqdm_kwargs={"desc": "fetching", "unit": "B", **BAR_OPTIONS}))
        except Exception as error:  # each kind of store raises its own
            raise UserError(f"data.path: {name} can't be fetched: {error}; copy it here, or try again later") from error
    return files


def _sha256(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for chunk, _, _ in _read(files, 32 * CHUNK):  # few steps: each one asks for the interpreter's lock
        digest.update(chunk)
    return digest.hexdigest()


def _read(files: Sequence[str], size: int) -> Iterator[tuple[bytes, str, bool]]:
    for name in files:
        with open(name, "rb", buffering=0) as file:
            while chunk := file.read(size):
                yield chunk, name, False
            yield b"", name, True


def _pieces(files: Sequence[str], bar: tqdm) -> Iterator[bytes | np.ndarray]:
    """The text's code points in pieces: bytes where all are below 256, else (n,) uint32."""
    rest, done = b"", 0
    for chunk, name, last in _read(files, CHUNK):
        bar.update(len(chunk))
        piece: bytes | np.ndarray = chunk
        if not rest and chunk.isascii():
            done += len(chunk)
        else:
            data = rest + chunk
            try:
                text, used = codecs.utf_8_decode(data, "strict", last)
            except UnicodeDecodeError as error:
                where = done + error.start
                raise UserError(
                    f"data.path: {name} is not UTF-8 text: byte {where} is {data[error.start]:#04x}; "
                    "convert it, as `iconv -f LATIN1 -t UTF-8` does from Latin-1"
                ) from error
            rest, done = data[used:], done + used
            try:
                piece = text.encode("latin-1")
            except UnicodeEncodeError:
                piece = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        if len(piece):
            yield piece
        if last:
            rest, done = b"", 0


def _add_codes(piece: bytes | np.ndarray, codes: set[int]) -> None:
    """Adds the code points of `piece` to `codes`."""
    if isinstance(piece, bytes):
        for part in (piece[:4096], piece):  # the set is slow: what a short part adds is cut out of the long one
            codes.update(part.translate(None, delete=bytes(code for code in codes if code < 256)))
    else:
        codes.update(np.flatnonzero(np.bincount(piece)).tolist())


def _table(order: Sequence[int]) -> np.ndarray:
    """Maps each number in `order` to its place there, and all others to the greatest value of the narrowest dtype."""
    dtype = np.min_scalar_type(len(order) - 1)
    table = np.full(max(255, *order) + 2, np.iinfo(dtype).max, dtype=dtype)
    table[order] = np.arange(len(order))
    return table


def _look_up(piece: bytes | np.ndarray, table: np.ndarray) -> np.ndarray:
    if isinstance(piece, bytes) and table.dtype == np.uint8:
        return np.frombuffer(piece.translate(table[:256].tobytes()), dtype=np.uint8)
    codes = np.frombuffer(piece, dtype=np.uint8) if isinstance(piece, bytes) else piece
    return table.take(codes, mode="clip")  # the table's last entry stands for all beyond it


def _write_tokens(files: Sequence[str], target: str, bar: tqdm, known: Sequence[int] = ()) -> str:
    """Writes the text as tokens into the .npy file `target`, flushes it to disk and returns the vocabulary.

    The text is decoded once. A character that turns up after the first chunks gets the next number, and the tokens are
    brought into order at the end. `known` are code points that the text is known to hold.
    """
    bar.update(-bar.n)  # reset() would show it at once
    pieces = _pieces(files, bar)
    first = list(itertools.islice(pieces, FIRST))
    codes, count = set(known), 0
    for piece in first:
        _add_codes(piece, codes)
    if not first:
        return ""
    table = _table(order := sorted(codes))
    unknown = np.iinfo(table.dtype).max
    with open(target, "w+b") as file:
        # The header holds the length, known only at the end: numpy pads it, so that rewriting it keeps its size.
        np.lib.format.write_array_header_1_0(file, _header(table.dtype, 0))
        start = file.tell()
        for piece in itertools.chain(first, pieces):
            tokens = _look_up(piece, table)
            if unknown in tokens:  # or the last character, if the integers are just enough
                _add_codes(piece, codes)
                if len(codes) > unknown + 1:
                    file.close()  # what it still holds would be written over the new tokens
                    return _write_tokens(files, target, bar, sorted(codes))
                table = _table(order := order + sorted(codes.difference(order)))
                tokens = _look_up(piece, table)
            file.write(tokens.data)
            count += len(tokens)
        if order != sorted(order):
            _renumber(file, start, _table(np.argsort(order).tolist()))
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, _header(table.dtype, count))
        file.flush()
        os.fsync(file.fileno())
    return "".join(map(chr, sorted(order)))


def _renumber(file: BinaryIO, start: int, table: np.ndarray) -> None:
    """Replaces each token from byte `start` on by its entry in `table`."""
    file.seek(start)
    while data := file.read(CHUNK * table.itemsize):
        file.seek(-len(data), os.SEEK_CUR)
        file.write(_look_up(data if table.itemsize == 1 else np.frombuffer(data, dtype=table.dtype), table).data)


def _header(dtype: np.dtype, count: int) -> dict:
    return {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
