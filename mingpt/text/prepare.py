"""Writes the tokens of texts to a folder: train.bin and val.bin, tokenizer.json and meta.json."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mingpt.errors import UserError
from mingpt.files import replace_file, replaced_file
from mingpt.monitoring.logging import BAR_OPTIONS, logger
from mingpt.text.documents import END_OF_DOCUMENT, Texts
from mingpt.text.tokenizer import Tokenizer

BATCH_SIZE = 256  # pieces that all cores encode together; their tokens take some 100 MB
CHECKED_PIECES = 4  # that are decoded again
SHOWN = 30  # characters of an example


@dataclass
class Measured:
    """What the first pass over a text finds.

    Attributes:
        length: number of characters
        characters: the distinct ones
        has_several: whether there are several documents
        sha256: digest of the text in UTF-8, without what ends documents
    """

    length: int = 0
    characters: set[str] = field(default_factory=set)
    has_several: bool = False
    sha256: str = ""


def measure(texts: Texts) -> Measured:
    """Reads all documents of texts."""
    measured = Measured()
    digest = hashlib.sha256()
    for piece in tqdm(texts.pieces(), "reading", unit=" pieces", **BAR_OPTIONS):
        measured.length += len(piece)
        measured.characters |= {*piece}
        measured.has_several |= piece == END_OF_DOCUMENT
        digest.update(piece.encode())
    measured.sha256 = digest.hexdigest()
    return measured


def split_pieces(pieces: Iterable[str], train_length: int) -> Iterator[tuple[str, str]]:
    """Yields the first `train_length` characters for `train` and the others for `val`."""
    position = 0
    for piece in pieces:
        end = max(train_length - position, 0)
        position += len(piece)
        if end > 0:
            yield "train", piece[:end]
        if end < len(piece) or end == 0:
            yield "val", piece[end:]


def encode_pieces(
    pieces: Iterable[tuple[str, str]], tokenizer: Tokenizer, end: str | None, key: str
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields the tokens of each piece, after its part and the piece.

    Args:
        pieces: part and text
        end: what ends a document
        key: key or option of the text, for messages
    """
    pieces = iter(pieces)
    end_tokens = tokenizer.token_of(end) if end else np.zeros(0, np.uint8)
    is_first = True
    while batch := list(islice(pieces, BATCH_SIZE)):
        texts = [piece for _, piece in batch]
        encoded = tokenizer.encode_batch(texts, key)
        if is_first:
            decoded = tokenizer.decode(np.concatenate(encoded[:CHECKED_PIECES]))
            _compare("".join(texts[:CHECKED_PIECES]), decoded)
            is_first = False
        for (part, piece), tokens in zip(batch, encoded, strict=True):
            yield part, piece, end_tokens if piece == END_OF_DOCUMENT else tokens


def _compare(text: str, decoded: str) -> None:
    """Warns if tokens lose a part of their text."""
    if text == decoded:
        return
    same = next(i for i, (a, b) in enumerate(zip_longest(text, decoded)) if a != b)
    logger.warning(
        f"the tokenizer changes the text: {text[same : same + SHOWN]!r} becomes {decoded[same : same + SHOWN]!r}, and "
        "training does not see the difference"
    )


def prepare(
    texts: Texts, out: Path, train_split: float, choose_tokenizer: Callable[[Measured], Tokenizer], source: Any = None
) -> dict[str, Any]:
    """Writes the four files, train.bin last. Returns the content of meta.json.

    The texts are read once to measure them, and once to encode them.

    Args:
        choose_tokenizer: returns a tokenizer for a text that has been measured
        source: an entry of meta.json

    Raises:
        UserError: there is no text, it can't be read or encoded, or the folder has a train.bin.
    """
    measured = measure(texts)
    train_length = int(measured.length * train_split)
    if not 0 < train_length < measured.length:
        raise UserError(
            f"{texts.key}: {measured.length} characters, of which train_split {train_split} leaves none for a part"
        )
    end = None
    if measured.has_several:
        measured.characters.add("\n")  # it ends documents of characters
    tokenizer = choose_tokenizer(measured)
    if measured.has_several:
        end = tokenizer.document_end
        if end is None or end not in tokenizer.vocabulary:
            raise UserError(
                f"{texts.key}: {end or 'no known name'} is a token of the tokenizer, which must have one that ends "
                "documents; name it with --end_of_text of data/prepare.py"
            )
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    meta: dict[str, Any] = {"dtype": dtype.name, "end_of_text": end, "text_sha256": measured.sha256}
    meta |= {"train_split": train_split, "source": source}
    meta |= {part: {"tokens": 0, "bytes": 0} for part in ("train", "val")}
    out.mkdir(parents=True, exist_ok=True)
    with (
        replaced_file(out / "train.bin") as train,
        replaced_file(out / "val.bin") as val,
        tqdm(desc="encoding", unit="B", **BAR_OPTIONS) as bar,
    ):
        files = {"train": train, "val": val}
        parts = split_pieces(texts.pieces(), train_length)
        for part, piece, tokens in encode_pieces(parts, tokenizer, end, texts.key):
            files[part].write(tokens.astype(dtype).tobytes())
            meta[part]["tokens"] += len(tokens)
            meta[part]["bytes"] += len(piece.encode())
            bar.update(len(piece))
        if (out / "train.bin").exists():
            raise UserError(f"{out} has a train.bin, which another process has written; name another folder")
        replace_file(out / "tokenizer.json", tokenizer.to_json())
        replace_file(out / "meta.json", json.dumps(meta, indent=2) + "\n")
    for leftover in out.glob("*.tmp"):  # of processes that were killed
        leftover.unlink()
    return meta
