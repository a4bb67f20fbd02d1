"""Reads texts as documents, in pieces: the one reader of texts for training, evaluation and data/prepare.py."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.core import OpenFile

from mingpt.errors import UserError
from mingpt.text.files import readable

PIECE_SIZE = 1 << 14  # characters of a long document that are encoded at once
PARQUET_BLOCK = 1 << 22  # bytes of a request to a server; a stream could not be read from its end
END_OF_DOCUMENT = ""  # in a sequence of pieces
JSON_LINES = {".jsonl", ".ndjson", ".json"}
LAST_WORD = re.compile(r"(?s).*\S(?=\s\S)")  # up to the last word that is followed by one blank and another word


@dataclass(frozen=True)
class Texts:
    """The documents of files. Each call of `pieces` reads the files.

    A file of text is one document. Files of JSON lines and .parquet files have one in a field of each line or row.

    Attributes:
        files: of `find_files`
        key: key or option of their paths, for messages
        field: the field of lines and rows
    """

    files: Sequence[OpenFile]
    key: str
    field: str = "text"

    def pieces(self) -> Iterator[str]:
        """Yields the documents in pieces, and END_OF_DOCUMENT after each one if there are several.

        Raises:
            UserError: a file can't be read, is no text, or lacks the field.
        """
        number = 0
        for file in self.files:
            with readable(file.path, self.key):
                for document in self._documents(file):
                    if number == 1:
                        yield END_OF_DOCUMENT  # of the first one
                    yield from cut(document)
                    if number > 0:
                        yield END_OF_DOCUMENT
                    number += 1

    def _documents(self, file: OpenFile) -> Iterator[Iterable[str]]:
        """Yields the chunks of each document."""
        suffixes = {*Path(file.path).suffixes[-2:]}
        if ".parquet" in suffixes:
            from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - optional

            with file.fs.open(file.path, block_size=PARQUET_BLOCK) as content:
                table = ParquetFile(content)
                columns = [self.field] if self.field in table.schema_arrow.names else None
                for batch in table.iter_batches(columns=columns, batch_size=1000):
                    for row in batch.to_pylist():
                        yield [self._text_of(row, file.path)]
            return
        with file as lines:
            if not suffixes & JSON_LINES:
                chunks = iter(partial(lines.read, PIECE_SIZE), "")
                yield (self._checked(chunk, file.path) for chunk in chunks)
                return
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    place = f"{file.path}, line {number},"
                    with readable(place, self.key):
                        row = json.loads(line)
                    yield [self._text_of(row, place)]

    def _checked(self, chunk: str, name: str) -> str:
        """Returns a chunk of a file of text."""
        if "\0" in chunk or chunk.startswith("version https://git-lfs"):
            raise UserError(
                f"{self.key}: {name} is no text, but has NUL characters or is a pointer of Git LFS; unpack an archive, "
                "run `git lfs pull`, or name the folder of a train.bin"
            )
        return chunk

    def _text_of(self, row: Any, place: str) -> str:
        """Returns the text of a line of JSON or of a row."""
        if not isinstance(row, dict):
            raise UserError(
                f"{self.key}: {place} is no object of JSON; `jq -c .[] FILE` writes the objects of an array as lines"
            )
        text = row.get(self.field, 0)
        if not isinstance(text, str | None):
            raise UserError(
                f"{self.key}: {place} has no text in the field {self.field!r}; its fields are {', '.join(row)}. Select "
                "one by data.field or --field"
            )
        return (text or "").encode(errors="replace").decode()  # JSON may have half of a surrogate pair


def cut(chunks: Iterable[str]) -> Iterator[str]:
    """Cuts a document, which comes in chunks, into pieces. No token of GPT-2's rules crosses their ends."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        while len(rest) - start > PIECE_SIZE:
            end = start + PIECE_SIZE
            if word := LAST_WORD.match(rest, start, end):
                end = word.end()
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest
