"""Reads texts as documents, in pieces: the one reader of texts for training, evaluation and data/prepare.py."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from mingpt.errors import UserError
from mingpt.text.files import find_files, open_text, readable, without_query

PIECE_SIZE = 1 << 14  # characters of a long document that are encoded at once
PARQUET_BLOCK = 1 << 22  # bytes of a request to a server; a stream could not be read from its end
END_OF_DOCUMENT = ""  # in a sequence of pieces
JSON_LINES = {".jsonl", ".ndjson", ".json"}
LAST_WORD = re.compile(r"(?s).*\S(?=\s\S)")  # up to the last word that is followed by one blank and another word


@dataclass(frozen=True)
class Texts:
    """The documents of files. Each use reads the files again.

    A file of text is one document. A file of JSON lines or a .parquet has a document in a field of each line or row.

    Attributes:
        paths: files, globs or fsspec URLs
        key: key or option of the paths, for messages
        field: the field of JSON lines and rows
    """

    paths: Sequence[str]
    key: str
    field: str = "text"

    def pieces(self) -> Iterator[str]:
        """Yields the documents in pieces, and END_OF_DOCUMENT after each one if there are several.

        Raises:
            UserError: a file can't be read, is no text, or lacks the field.
        """
        for number, document in enumerate(self._documents()):
            if number == 1:
                yield END_OF_DOCUMENT  # of the first one
            yield from cut(document)
            if number > 0:
                yield END_OF_DOCUMENT

    def _documents(self) -> Iterator[Iterable[str]]:
        """Yields the chunks of each document."""
        for path in self.paths:
            fs, names = find_files(path, self.key)
            for name in names:
                with readable(name, self.key):
                    yield from self._documents_of(fs, name)

    def _documents_of(self, fs: fsspec.AbstractFileSystem, name: str) -> Iterator[Iterable[str]]:
        suffixes = {*Path(without_query(name)).suffixes}
        if ".parquet" in suffixes:
            from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - optional

            with fs.open(name, block_size=PARQUET_BLOCK) as content:
                file = ParquetFile(content)
                columns = [self.field] if self.field in file.schema_arrow.names else None
                for batch in file.iter_batches(columns=columns, batch_size=1000):
                    for row in batch.to_pylist():
                        yield [self._text_of(row, name)]
            return
        with open_text(fs, name) as lines:
            if not suffixes & JSON_LINES:
                yield map(partial(self._check, name), iter(partial(lines.read, PIECE_SIZE), ""))
                return
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield [self._text_of(line, f"{name}, line {number},")]

    def _text_of(self, row: Any, place: str) -> str:
        """Returns the text of a line of JSON or of a row."""
        if isinstance(row, str):
            with readable(place, self.key):
                row = json.loads(row)
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

    def _check(self, name: str, chunk: str) -> str:
        """Returns a chunk of a file of text; raises a UserError if it is no text."""
        if "\0" in chunk:
            raise UserError(
                f"{self.key}: {name} has NUL characters, so it is no text; unpack an archive, or name the folder of a "
                "train.bin"
            )
        if chunk.startswith("version https://git-lfs"):
            raise UserError(f"{self.key}: {name} is a pointer of Git LFS; `git lfs pull` loads the file")
        return chunk


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
