"""Every text is read as documents, by one reader, and the end of a document is one token."""

import bz2
import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data import prepare
from mingpt.config.schema import DataConfig
from mingpt.errors import UserError
from mingpt.program import run_program
from mingpt.text.corpus import open_folder
from mingpt.text.documents import END_OF_DOCUMENT, Texts, cut
from mingpt.text.files import find_files
from mingpt.text.tokenizer import JSONTokenizer, parse_tokenizer, read_tokenizer
from tests.inside import byte_pair_tokenizer, hub_form, prepare_text

DOCUMENTS = ["one\n", "two é", "", "three 🙂 " * 9, "?"]
ROWS = [{"id": 1, "text": text or None} for text in [*DOCUMENTS[:-1], "\ud83d"]]  # half of a surrogate pair becomes ?
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def pieces_of(*paths: Path, field: str = "text") -> list[str]:
    files = [file for path in paths for file in find_files(str(path), "TEXT")]
    return list(Texts(files, "TEXT", field).pieces())


def as_pieces(documents: list[str]) -> list[str]:
    return [piece for document in documents for piece in (*cut([document]), END_OF_DOCUMENT)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "c4.00000.json.gz", "a.jsonl.bz2", "a.parquet"])
def test_lines_and_rows_are_documents_in_every_format(name: str, tmp_path: Path) -> None:
    """A text may be null, and lines may be blank."""
    file = tmp_path / name
    if name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        from pyarrow import parquet

        rows = [row | {"text": row["text"] and row["text"].replace("\ud83d", "?")} for row in ROWS]
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        compress = {".gz": gzip.compress, ".bz2": bz2.compress}.get(file.suffix, bytes)
        file.write_bytes(compress(f"{LINES}\n  \n".encode()))
    assert pieces_of(file) == as_pieces(DOCUMENTS)
    with pytest.raises(UserError, match=r"has no text in the field 'content'; its fields are id, text\."):
        pieces_of(file, field="content")


def test_a_file_of_text_is_one_document_and_only_several_documents_have_ends(tmp_path: Path) -> None:
    for number, document in enumerate(DOCUMENTS[:2]):
        (tmp_path / f"{number}.txt").write_text(document, encoding="utf-8")
    assert pieces_of(tmp_path / "0.txt") == ["one\n"]
    assert pieces_of(tmp_path / "*.txt") == as_pieces(DOCUMENTS[:2])
    assert pieces_of(tmp_path / "1.txt", tmp_path / "0.txt") == as_pieces([DOCUMENTS[1], DOCUMENTS[0]])


def test_a_long_document_is_cut_between_words() -> None:
    text = "some words\n\n  and more. " * 5000
    for chunks in ([text], [text[start : start + 1000] for start in range(0, len(text), 1000)]):
        pieces = list(cut(chunks))
        assert "".join(pieces) == text
        assert all(piece[-1] != " " and after[:1].isspace() for piece, after in pairwise(pieces))


def test_a_tokenizer_json_in_the_form_of_gpt2_s_is_read(tmp_path: Path) -> None:
    tokenizer = byte_pair_tokenizer(LINES, 300)
    (tmp_path / "tokenizer.json").write_text(hub_form(tokenizer))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        found = read_tokenizer(str(path))
        assert found.encode(LINES, "").tolist() == tokenizer.encode(LINES, "").tolist()
        assert found.end_of_text == "<|endoftext|>"


def ends_of(folder: Path, **keys: object) -> tuple[str, str | None]:
    """Returns the text of both parts of a folder, and the end of its documents."""
    corpus = open_folder(folder, DataConfig(block_size=1))
    return corpus.tokenizer.decode(np.concatenate([corpus.training, corpus.validation])), corpus.tokenizer.end_of_text


def test_a_document_ends_with_the_token_of_the_tokenizer_or_with_a_line_break(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    text = tmp_path / "a.jsonl"
    prepare_text(text, tmp_path / "char", "char")
    assert ends_of(tmp_path / "char") == ("".join(f"{document}\n" for document in DOCUMENTS), None)  # one has a \n
    (tmp_path / "names.jsonl").write_text('{"text": "anna"}\n{"text": "bob"}\n')
    prepare_text(tmp_path / "names.jsonl", tmp_path / "names", "char", "--train_split", "0.5")
    assert ends_of(tmp_path / "names") == ("anna\nbob\n", "\n")
    meta = json.loads((tmp_path / "char/meta.json").read_text())
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == len("".join(DOCUMENTS).encode())

    content = byte_pair_tokenizer(LINES, 300).to_json()
    (tmp_path / "tokenizer.json").write_text(content)
    prepare_text(text, tmp_path / "known", str(tmp_path / "tokenizer.json"))
    assert ends_of(tmp_path / "known")[1] == "<|endoftext|>"
    (tmp_path / "tokenizer.json").write_text(content.replace("<|endoftext|>", "[END]"))
    argv = [str(text), "--out", str(tmp_path / "none"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert run_program(prepare.run, argv) == 2
    assert run_program(prepare.run, [*argv, "--end_of_text", "[EOS]"]) == 2
    assert "[EOS], the end of a document, is no token of it" in capfd.readouterr().err
    prepare_text(text, tmp_path / "option", str(tmp_path / "tokenizer.json"), "--end_of_text", "[END]")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "[END]"}}')
    prepare_text(text, tmp_path / "config", str(tmp_path))
    expected = "".join(f"{document}[END]" for document in DOCUMENTS), "[END]"
    assert ends_of(tmp_path / "option") == ends_of(tmp_path / "config") == expected


def test_a_tokenizer_that_changes_the_text_is_named_with_an_example(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(byte_pair_tokenizer("some words and more", 270).to_json())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text("some WORDS and more " * 30)
    prepare_text(tmp_path / "text.txt", tmp_path / "out", str(tmp_path))
    assert "warning: TEXT: the tokenizer changes the text: 'WORDS and more" in capfd.readouterr().err
    assert isinstance(parse_tokenizer(json.dumps(content)), JSONTokenizer)
