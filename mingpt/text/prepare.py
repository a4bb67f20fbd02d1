"""Writes the tokens of texts to a folder: train.bin and val.bin, tokenizer.json and meta.json."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
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
SHOWN = 30  # characters of an example


def split_at(pieces: Iterable[str], position: int) -> Iterator[str]:
    """Yields the pieces of a text, and cuts the one at a position in two."""
    for piece in pieces:
        if 0 < position < len(piece):
            yield piece[:position]
            yield piece[position:]
        else:
            yield piece
        position -= len(piece)


def encode_pieces(pieces: Iterable[str], tokenizer: Tokenizer, key: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each piece of a text and its tokens. Warns if the tokens of the first piece decode to another text.

    Args:
        key: key or option of the text, for messages

    Raises:
        UserError: a piece can't be encoded, or no token can end a document.
    """
    end = tokenizer.document_end
    ends = [tokenizer.vocabulary.index(end)] if end in tokenizer.vocabulary else []
    pieces = iter(pieces)
    is_checked = False
    with tqdm(desc="encoding", unit="B", **BAR_OPTIONS) as bar:
        while batch := list(islice(pieces, BATCH_SIZE)):
            encoded = tokenizer.encode_batch(batch, key)
            if not is_checked:
                compare(batch[0], tokenizer.decode(encoded[0]), key)
                is_checked = True
            for piece, tokens in zip(batch, encoded, strict=True):
                bar.update(len(piece))
                if piece == END_OF_DOCUMENT and not ends:
                    raise UserError(
                        f"{key}: the tokenizer has no {end!r}, which ends documents; write the tokens with "
                        "data/prepare.py and another --end_of_text"
                    )
                yield piece, np.array(ends) if piece == END_OF_DOCUMENT else tokens


def compare(text: str, decoded: str, key: str) -> None:
    """Warns if decoded tokens are not the text."""
    if text != decoded:
        first = next(i for i, (a, b) in enumerate(zip_longest(text, decoded)) if a != b)
        example = slice(first, first + SHOWN)
        logger.warning(f"{key}: the tokenizer changes the text: {text[example]!r} becomes {decoded[example]!r}")


def prepare(
    texts: Texts,
    out: Path,
    train_split: float,
    choose_tokenizer: Callable[[set[str], int], Tokenizer],
    source: Any = None,
) -> dict[str, Any]:
    """Writes the four files, train.bin last. Returns the content of meta.json.

    The texts are read once to measure them, and once to encode them.

    Args:
        choose_tokenizer: returns the tokenizer, from the characters of the text and the length of the training part
        source: an entry of meta.json

    Raises:
        UserError: there is no text, it can't be read or encoded, or the folder has a train.bin.
    """
    length = 0
    characters: set[str] = set()
    has_several = False
    digest = hashlib.sha256()
    for piece in tqdm(texts.pieces(), "reading", unit=" pieces", **BAR_OPTIONS):
        length += len(piece)
        characters |= {*piece}
        has_several |= piece == END_OF_DOCUMENT
        digest.update(piece.encode())
    train_length = int(length * train_split)
    if not 0 < train_length < length:
        raise UserError(f"{texts.key}: {length} characters, of which train_split {train_split} leaves none for a part")
    tokenizer = choose_tokenizer(characters | {"\n"} if has_several else characters, train_length)
    # A line break marks the end of a document if there are none within documents.
    marks_end = has_several and tokenizer.document_end not in characters
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    meta: dict[str, Any] = {
        "dtype": dtype.name,
        "end_of_text": tokenizer.document_end if marks_end else tokenizer.end_of_text,
        "text_sha256": digest.hexdigest(),
        "train_split": train_split,
        "source": source,
        "train": {"tokens": 0, "bytes": 0},
        "val": {"tokens": 0, "bytes": 0},
    }
    out.mkdir(parents=True, exist_ok=True)
    with replaced_file(out / "train.bin") as train, replaced_file(out / "val.bin") as val:
        position = 0
        pieces = split_at(texts.pieces(), train_length)
        for piece, tokens in encode_pieces(pieces, tokenizer, texts.key):
            part, file = ("train", train) if position < train_length else ("val", val)
            position += len(piece)
            file.write(tokens.astype(dtype).tobytes())
            meta[part]["tokens"] += len(tokens)
            meta[part]["bytes"] += len(piece.encode())
        if (out / "train.bin").exists():
            raise UserError(f"{out} has a train.bin, which another process has written; name another folder")
        replace_file(out / "tokenizer.json", tokenizer.to_json())
        replace_file(out / "meta.json", json.dumps(meta, indent=2) + "\n")
    for leftover in out.glob("*.tmp"):  # of processes that were killed
        leftover.unlink()
    return meta
