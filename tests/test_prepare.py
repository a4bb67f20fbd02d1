"""data/prepare.py writes the tokens of texts, all of them or none."""

import bz2
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import prepare
from mingpt.errors import UserError
from mingpt.program import run_program as exit_status_of
from mingpt.text import prepare as library
from mingpt.text.documents import Texts
from mingpt.text.files import find_files
from mingpt.text.tokenizer import CharTokenizer, JSONTokenizer, parse_tokenizer
from tests.helpers import ROOT, clean_env
from tests.inside import assert_one_message, byte_pair_tokenizer, prepare_text

LETTERS = "abcdefghijklmnopqrstuvwxyzé—🙂"
NAMES = {"train.bin", "val.bin", "tokenizer.json", "meta.json"}


def random_words(count: int, seed: int = 0) -> str:
    """Returns words of a random language, with blank lines and runs of blanks."""
    source = random.Random(seed)
    words = ["".join(source.choices(LETTERS, k=source.randint(1, 8))) for _ in range(400)]
    return "".join(source.choice(words) + source.choice([" ", " ", " ", "\n", "\n\n", "  "]) for _ in range(count))


def read_folder(folder: Path) -> tuple[str, dict[str, list[int]], dict[str, Any]]:
    """Returns the text of tokenizer.json, the tokens of each part, and meta.json."""
    assert {file.name for file in folder.iterdir()} == NAMES
    meta = json.loads((folder / "meta.json").read_text())
    tokens = {part: np.fromfile(folder / f"{part}.bin", meta["dtype"]).tolist() for part in ("train", "val")}
    return (folder / "tokenizer.json").read_text(), tokens, meta


@pytest.mark.parametrize("kind", ["char", "600"])
def test_the_parts_are_those_of_a_run_on_the_text_and_meta_describes_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is encoded in pieces, which end where no token crosses their ends."""
    if kind != "char":
        pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    monkeypatch.setattr("mingpt.text.documents.PIECE_SIZE", 500)
    text = random_words(3000)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    prepare_text(tmp_path / "text.txt", tmp_path / "out", kind, "--train_split", "0.8")
    content, tokens, meta = read_folder(tmp_path / "out")
    tokenizer = parse_tokenizer(content)
    cut = int(len(text) * 0.8)
    for part, expected in {"train": text[:cut], "val": text[cut:]}.items():
        if isinstance(tokenizer, JSONTokenizer):
            assert tokens[part] == tokenizer.tokenizer.encode(expected).ids
        assert tokenizer.decode(tokens[part]) == expected
        assert meta[part]["tokens"] == len(tokens[part])
        assert meta[part]["bytes"] == len(expected.encode())
    assert meta["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert meta["end_of_text"] is None
    assert tokenizer.vocab_size == (len(set(text)) if kind == "char" else 600)


def test_documents_of_every_format_end_with_the_end_of_text(tmp_path: Path) -> None:
    """Half of a surrogate pair, which JSON may contain, is no character. A text may be null."""
    tokenizer = byte_pair_tokenizer(random_words(500), 300)
    documents = ["one\n", "", "two <|endoftext|> é", "three 🙂 " * 9, "four"]
    lines = "".join(json.dumps({"id": 1, "text": text or None}) + "\n" for text in [*documents, "\ud83d"])
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt.bz2").write_bytes(bz2.compress(documents[3].encode()))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    names = ["a.jsonl", "b.jsonl.gz", "c.txt.bz2"]
    expected = [*documents, "?", *documents, "?", documents[3]]
    if find_spec("pyarrow") is not None:
        import pyarrow
        from pyarrow import parquet

        rows = {"text": [text or None for text in documents], "url": documents}
        parquet.write_table(pyarrow.table(rows), tmp_path / "d.parquet")
        names.append("d.parquet")
        expected += documents
    argv = [*(str(tmp_path / name) for name in names), "--out", str(tmp_path / "out")]
    argv += ["--tokenizer", str(tmp_path / "tokenizer.json"), "--train_split", "0.5"]
    assert exit_status_of(prepare.run, argv) == 0
    _, tokens, _ = read_folder(tmp_path / "out")
    found = tokenizer.decode([*tokens["train"], *tokens["val"]])
    assert found == "".join(f"{document}<|endoftext|>" for document in expected)
    end = tokenizer.tokenizer.token_to_id("<|endoftext|>")
    assert [*tokens["train"], *tokens["val"]].count(end) == len(expected) + expected.count(documents[2])


def run_prepare(*argv: object, **env: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "data/prepare.py"), *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env(**env))


def test_the_number_of_cores_changes_no_byte(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(random_words(30_000, seed=i), encoding="utf-8")
    outputs = []
    for threads in ("1", "3"):
        out = tmp_path / threads
        process = run_prepare(f"{tmp_path}/*.txt", "--out", out, "--tokenizer", 2000, RAYON_NUM_THREADS=threads)
        assert process.communicate(timeout=60)[1] == ""
        outputs.append([(out / name).read_bytes() for name in sorted(NAMES - {"meta.json"})])
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_a_killed_one_leaves_nothing_half_and_the_same_command_begins_again(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "text.txt").write_text(random_words(400_000), encoding="utf-8")
    argv = (tmp_path / "text.txt", "--tokenizer", 2000, "--out")
    began = time.monotonic()
    process = run_prepare(*argv, tmp_path / "whole")
    assert process.communicate(timeout=100)[1] == ""
    duration = time.monotonic() - began
    for moment in range(1, 11):
        out = tmp_path / f"killed-{moment}"
        with run_prepare(*argv, out) as process:
            time.sleep(duration * moment / 11)
            process.kill()
        assert not (out / "train.bin").exists() or NAMES <= {file.name for file in out.iterdir()}
    for moment in (1, 5, 10):
        out = tmp_path / f"killed-{moment}"
        if not (out / "train.bin").exists():
            assert run_prepare(*argv, out).communicate(timeout=100)[1] == ""
        for name in NAMES - {"meta.json"}:
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert {file.name for file in out.iterdir()} == NAMES


CASES = [
    ("none.txt", "char", (), "TEXT: none.txt can't be read: FileNotFoundError"),
    ("empty.txt", "char", (), "TEXT: 0 characters, of which train_split 0.9 leaves none for a part"),
    ("bad.txt", "char", (), "bad.txt is not UTF-8 text: "),
    ("bad.jsonl", "char", (), "bad.jsonl, line 2, has no text in the field 'text'; its fields are content"),
    ("array.json", "char", (), "array.json, line 1, is no object of JSON; `jq -c .[] FILE`"),
    ("bad.jsonl", "char", ("--field", "id"), "line 1, has no text in the field 'id'; its fields are text, id"),
    ("text.txt", "100", (), "--tokenizer: 100 can't be read: FileNotFoundError"),
    ("text.txt", "none.json", (), "--tokenizer: none.json can't be read: FileNotFoundError"),
    ("text.txt", "text.txt", (), "--tokenizer: text.txt can't be read: JSONDecodeError"),
    ("text.txt", "char", ("--train_split", "1"), "train_split 1.0 leaves none for a part"),
    ("text.txt", "char", ("--out", "full"), "--out: full has a train.bin already"),
    ("text.txt", "char", ("--out", "text.txt/out"), "--out: text.txt/out can't be written: "),
]


@pytest.mark.parametrize(("text", "tokenizer", "options", "message"), CASES)
def test_bad_input_is_one_message_and_writes_nothing(
    text: str, tokenizer: str, options: tuple, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {"text.txt": b"some words", "empty.txt": b"", "bad.txt": b"words \xff"}
    contents["bad.jsonl"] = b'{"text": "some words", "id": 1}\n{"content": "other words"}\n'
    contents["array.json"] = b'[{"text": "some words"}]'
    for name, content in contents.items():
        Path(name).write_bytes(content)
    Path("full").mkdir()
    Path("full/train.bin").touch()
    before = sorted(os.listdir())
    argv = [text, "--out", "out", "--tokenizer", tokenizer, *options]
    assert exit_status_of(prepare.run, argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert_one_message(err, message)
    assert sorted(os.listdir()) == before


def test_what_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "rows.parquet").write_text("some words")
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    for module in ("tokenizers", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    for name, package in (("text.txt", "tokenizers"), ("rows.parquet", "pyarrow")):
        argv = [str(tmp_path / name), "--out", str(tmp_path / "out"), "--tokenizer", "300"]
        assert exit_status_of(prepare.run, argv) == 2
        assert f"run `pip install {package}" in capsys.readouterr().err


def test_a_large_vocabulary_has_tokens_of_32_bits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    tokenizer = byte_pair_tokenizer("words", 257)
    assert isinstance(tokenizer, JSONTokenizer)
    for vocab_size, dtype in ((1 << 16, "uint16"), (1 + (1 << 16), "uint32")):
        tokenizer.vocab_size = vocab_size
        meta = library.prepare(
            Texts(find_files(str(text), "TEXT"), "TEXT"), tmp_path / dtype, 0.5, lambda *_: tokenizer
        )
        assert meta["dtype"] == dtype


def test_of_two_at_once_the_first_to_end_wins(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words")
    texts = Texts(find_files(str(tmp_path / "text.txt"), "TEXT"), "TEXT")
    out = tmp_path / "out"

    def choose_tokenizer(characters: set[str], train_length: int) -> CharTokenizer:
        prepare_text(tmp_path / "text.txt", out, "char", "--train_split", "0.5")  # the other one, meanwhile
        return CharTokenizer().extended(characters)

    with pytest.raises(UserError, match=r"has a train\.bin, which another process has written"):
        library.prepare(texts, out, 0.9, choose_tokenizer)
    _, tokens, meta = read_folder(out)
    assert (meta["train_split"], len(tokens["train"])) == (0.5, 5)
