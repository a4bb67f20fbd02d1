"""What is sample number i? Corpus -> vocabulary -> windows -> global sample order.

The text is encoded once into a cache of the narrowest unsigned integers, which all ranks of a node map into memory.
Which window of it sample i is, is a pure function of (seed, i), so there is no sampler state to save.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.utils.data import Dataset

from errors import UserError

CHUNK = 1 << 20  # bytes: stays in a core's own cache while it is decoded, looked up and written
IGNORE = -1  # target of a position that has no next character; GPT's loss leaves it out


@dataclass(frozen=True)
class DataConfig:
    """What text is learned, and in which pieces.

    Args:
        path: text to learn, UTF-8: a file, a glob (files in sorted order), or any fsspec URL
        block_size: characters that the model sees at once (the window, T)
        train_split: share of the text that is trained on, from its start; the rest is for validation
        truncate: share of the text that is used at all, from its start; null uses all of it
    """

    path: str = "data/input.txt"
    block_size: int = 64
    train_split: float = 0.9
    truncate: float | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"data.block_size is {self.block_size}, must be at least 1")
        if not 0 < self.train_split < 1:
            raise ValueError(f"data.train_split is {self.train_split}, must be between 0 and 1, both excluded")
        if self.truncate is not None and not 0 < self.truncate <= 1:
            raise ValueError(f"data.truncate is {self.truncate}, must be null or above 0 and at most 1")


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
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            if isinstance(fs, LocalFileSystem):
                files = names
            else:
                files = [os.path.join(folder, f"{i}.txt") for i in range(len(names))]
                for name, file in zip(names, files, strict=True):
                    fs.get_file(name, file)
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
        hint = "; `python data/prepare.py` writes the default text" if path == DataConfig.path else ""
        raise UserError(f"data.path: no text at {path} (working directory {os.getcwd()}){hint}")
    names = [info["name"] for info in infos]
    if isinstance(fs, LocalFileSystem):
        return fs, names, repr([(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in names])
    return fs, names, repr([(name, fs.ukey(name)) for name in names])


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


def split(corpus: Corpus, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """The training part and the validation part of the text: the first ones and the last ones of its tokens.

    Raises:
        UserError: either part is shorter than one window and its last target.
    """
    used = corpus.tokens[: round(len(corpus.tokens) * (config.truncate or 1))]
    cut = int(len(used) * config.train_split)
    for name, part in (("training", used[:cut]), ("validation", used[cut:])):
        if len(part) < config.block_size + 1:
            raise UserError(
                f"data.block_size: the {name} part of {config.path} has {len(part)} characters, "
                f"a window needs block_size + 1 = {config.block_size + 1}; lower data.block_size, move "
                f"data.train_split ({config.train_split}) or use more text"
            )
    return used[:cut], used[cut:]


def hash64(*words: int | np.ndarray) -> np.ndarray:
    """Mixes integers into well-spread 64-bit ones, elementwise (splitmix64's finaliser; Steele et al., 2014)."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = (state ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where a keyed permutation of range(size) sends `index`: no table, each index on its own.

    An eight-round Feistel network on the square that just covers the range; what falls outside walks on until it is
    inside (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        index: (n,) integers in [0, size)
        size: how many there are
        key: (n,) uint64, the permutation to use for each
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    index = index.astype(np.uint64)
    walking = np.arange(len(index))
    while len(walking):
        left, right = np.divmod(index[walking], side)
        for round_number in range(8):
            left, right = right, (left + hash64(key[walking], round_number, right) % side) % side
        index[walking] = left * side + right
        walking = walking[index[walking] >= size]
    return index.astype(np.int64)


class CharDataset(Dataset):
    """Training windows, numbered without end: sample i is window i % len of epoch i // len.

    Each epoch shows each window once, in its own order and cut at its own offset. `dataset[7]` is one sample,
    `dataset[numbers]` a batch in one indexing operation.

    Args:
        tokens: (n,) training text
        block_size: characters in a window (T)
        seed: orders differ between seeds
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int) -> None:
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.windows = max(1, (len(tokens) - block_size) // block_size)

    def __len__(self) -> int:
        return self.windows

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """(n,) sample numbers -> (n,) position in the text at which each window starts."""
        epoch, index = np.divmod(numbers, self.windows)
        offset = hash64(self.seed, epoch, 0) % np.uint64(self._offsets())
        return offset.astype(np.int64) + self.block_size * permute(index, self.windows, hash64(self.seed, epoch, 1))

    def _offsets(self) -> int:
        return min(self.block_size, len(self.tokens) - self.windows * self.block_size)

    def __getitem__(self, numbers: int | Sequence[int] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample numbers, (B,) or one alone -> inputs and targets, (B, T) or (T,), int64."""
        many = np.atleast_1d(np.asarray(numbers, dtype=np.int64))
        window = np.arange(self.block_size + 1)
        batch = torch.from_numpy(self.tokens[self.starts(many)[:, None] + window].astype(np.int64))
        if np.ndim(numbers) == 0:
            batch = batch[0]
        return batch[..., :-1], batch[..., 1:]


class ValidationDataset(Dataset):
    """The validation text from end to end, in windows that do not overlap; IGNORE fills the last one's targets.

    Args:
        tokens: (n,) validation text
        block_size: characters in a window (T)
    """

    def __init__(self, tokens: np.ndarray, block_size: int) -> None:
        self.tokens, self.block_size = tokens, block_size

    def __len__(self) -> int:
        return math.ceil((len(self.tokens) - 1) / self.block_size)

    def count(self, windows: range) -> int:
        """How many characters are predicted in these windows."""
        return min(windows.stop * self.block_size, len(self.tokens) - 1) - windows.start * self.block_size

    def __getitem__(self, windows: range) -> tuple[torch.Tensor, torch.Tensor]:
        """B consecutive windows -> inputs and targets, (B, T), int64."""
        size = len(windows) * self.block_size
        text = self.tokens[windows.start * self.block_size : windows.stop * self.block_size + 1].astype(np.int64)
        idx, targets = torch.zeros(size, dtype=torch.int64), torch.full((size,), IGNORE)
        idx[: len(text) - 1] = torch.from_numpy(text[:-1])
        targets[: len(text) - 1] = torch.from_numpy(text[1:])
        return idx.view(-1, self.block_size), targets.view(-1, self.block_size)
