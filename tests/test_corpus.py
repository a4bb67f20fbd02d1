"""The text and its cache."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from conftest import ROOT, environment

import corpus
from corpus import Corpus, encode_corpus
from errors import UserError


def decoded(corpus: Corpus) -> str:
    return "".join(corpus.vocabulary[token] for token in corpus.tokens)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("hello world\r\n", np.uint8),
        ("naïve – “quoted” 🙂 text", np.uint8),
        ("".join(map(chr, range(32, 32 + 256))), np.uint8),
        ("".join(map(chr, range(32, 32 + 257))), np.uint16),
        ("".join(map(chr, range(0x20000, 0x20000 + 65_537))), np.uint32),
    ],
)
def test_encoding_keeps_every_character_in_the_narrowest_integers(text: str, dtype: type, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode())
    corpus = encode_corpus(str(file), tmp_path / "cache")
    assert decoded(corpus) == text
    assert corpus.tokens.dtype == dtype
    assert list(corpus.vocabulary) == sorted(set(text))


def test_characters_across_the_borders_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(random.Random(1).choices("ab\n", k=300)) + "".join(random.Random(1).choices("aé—🙂", k=300)) + "end"
    (tmp_path / "text.txt").write_bytes(text.encode())
    for chunk in (1, 2, 3, 5, 64, 301):
        monkeypatch.setattr(corpus, "CHUNK", chunk)
        assert decoded(encode_corpus(str(tmp_path / "text.txt"), tmp_path / f"cache{chunk}")) == text


def test_globs_and_urls(tmp_path: Path) -> None:
    for name, words in (("b.txt", "second"), ("a.txt", "first "), ("c.md", "not this")):
        (tmp_path / name).write_text(words)
    assert decoded(encode_corpus(f"{tmp_path}/*.txt", tmp_path / "one")) == "first second"
    with fsspec.open("memory://texts/far.txt", "wb") as file:
        file.write("far – away".encode())
    assert decoded(encode_corpus("memory://texts/far.txt", tmp_path / "two")) == "far – away"
    assert sorted(os.listdir(tmp_path / "two"))[0] == "text.json"
    assert len(os.listdir(tmp_path / "two")) == 2


def test_the_cache_is_used_until_the_text_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "text.txt", tmp_path / "cache"
    file.write_text("one text")
    first = encode_corpus(str(file), cache)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_tokens", None)  # encoding again would fail
        again = encode_corpus(str(file), cache)
    assert again.sha256 == first.sha256
    assert isinstance(again.tokens.base, np.memmap)
    for words in ("another", "another!"):  # other bytes, other size
        file.write_text(words)
        assert decoded(encode_corpus(str(file), cache)) == words
    (cache / "text.json").write_text("{torn")
    (cache / "unfinished-abc").mkdir()  # a run was killed while it encoded
    (cache / "unfinished-abc/tokens.npy").write_bytes(b"half")
    assert decoded(encode_corpus(str(file), cache)) == "another!"
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no text at"),
        (b"", "empty"),
        (b"ok \xff no", "byte 3 is 0xff"),
        (b"cut short \xe2\x80", "byte 10 is 0xe2"),
    ],
)
def test_bad_texts(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError, match=words):
        encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    line = "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. " * 1000
    peaks = []
    for megabytes in (20, 200):
        with open(tmp_path / "text.txt", "w", encoding="utf-8") as file:
            for _ in range(megabytes * 10**6 // len(line.encode())):
                file.write(line)
        script = (
            "import resource, sys, corpus, pathlib;"
            "corpus.encode_corpus(sys.argv[1], pathlib.Path(sys.argv[2]));"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        argv = [sys.executable, "-c", script, str(tmp_path / "text.txt"), str(tmp_path / f"cache{megabytes}")]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment(), cwd=ROOT, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 30_000  # kilobytes
