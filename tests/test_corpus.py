"""The text and its cache."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers import ROOT, clean_env

from mingpt import corpus
from mingpt.corpus import Corpus, encode_corpus
from mingpt.utils.errors import UserError


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


def later(*parts: tuple[str, int]) -> str:
    """Parts of a text: so many characters drawn from each alphabet, one part after the other."""
    return "".join("".join(random.Random(i).choices(letters, k=k)) for i, (letters, k) in enumerate(parts))


LATIN, WIDE = "".join(map(chr, range(32, 256))), "".join(map(chr, range(0x4E00, 0x4F00)))


@pytest.mark.parametrize("chunk", [3, 64, 1 << 17])
@pytest.mark.parametrize(
    "text",
    [
        later(("mz", 900), ("az~!", 900)),  # ASCII throughout, with new characters late and out of order
        later(("xyz", 900), ("aé\x80ÿ", 900), ("b🙂—z", 900), ("ab", 900)),
        later((LATIN, 1500)) + later((WIDE[:32], 1500)) + "late !",  # all 256 integers of a byte used up, then none new
        later((LATIN, 1500), (WIDE, 1500), ("\n", 10)),  # more than a byte holds, found out late
        later((WIDE[::-1], 900), (LATIN, 900), ("\n", 10)),
        later(("".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)])), 400), ("a", 10)),
    ],
)
def test_tokens_are_those_of_a_dictionary(
    text: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_bytes(text.encode())
    monkeypatch.setattr(corpus, "CHUNK", chunk)
    encoded = encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache")
    vocabulary = sorted(set(text))
    token = {character: i for i, character in enumerate(vocabulary)}
    assert encoded.vocabulary == "".join(vocabulary)
    assert encoded.tokens.tolist() == [token[character] for character in text]
    assert encoded.tokens.dtype == np.min_scalar_type(len(vocabulary) - 1)
    assert encoded.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_a_bad_byte_is_named_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK", 5)
    (tmp_path / "a.txt").write_bytes("aé—🙂".encode() * 50)
    (tmp_path / "b.txt").write_bytes("aé—🙂".encode() * 50 + b"ok\xf0\x9f\x99")  # the next file does not complete it
    (tmp_path / "c.txt").write_bytes(b"\x82 ok")
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8 text: byte 502 is 0xf0"):
        encode_corpus(f"{tmp_path}/*.txt", tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


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


def test_a_cache_that_something_is_in_the_way_of(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "cache/text.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"data\.path: .*text\.txt can't be encoded into .*cache: .*; make room there"):
        encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache")


def test_a_store_that_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*args: object, **options: object) -> None:
        raise OSError("connection reset")

    with fsspec.open("memory://texts/cut.txt", "wb") as file:
        file.write(b"words")
    monkeypatch.setattr(MemoryFileSystem, "get_file", reset)
    with pytest.raises(
        UserError, match=r"data\.path: /texts/cut\.txt can't be fetched: connection reset; copy it here"
    ):
        encode_corpus("memory://texts/cut.txt", tmp_path / "cache")
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
        done = subprocess.run(argv, capture_output=True, text=True, env=clean_env(), cwd=ROOT, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 30_000  # kilobytes
