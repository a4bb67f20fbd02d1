"""Encoding of text, and its cache."""

import codecs
import gzip
import hashlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mingpt.errors import UserError
from mingpt.text import corpus
from mingpt.text.corpus import Corpus, check_text, encode_corpus
from tests.helpers import ROOT, clean_env


def decode(corpus: Corpus) -> str:
    return "".join(corpus.vocabulary[token] for token in corpus.tokens)


def random_text(*parts: tuple[str, int]) -> str:
    """Returns consecutive parts, each of random characters from an alphabet."""
    return "".join("".join(random.Random(i).choices(letters, k=k)) for i, (letters, k) in enumerate(parts))


LATIN, WIDE = "".join(map(chr, range(32, 256))), "".join(map(chr, range(0x4E00, 0x4F00)))


@pytest.mark.parametrize("chunk_size", [1, 5, 1 << 17])
@pytest.mark.parametrize(
    "text",
    [
        "naïve – “quoted” 🙂 text\r\n" * 20,
        random_text((LATIN, 1500), (WIDE[:32], 1500), ("late !", 9)),  # all values of uint8 used, then known characters
        random_text((LATIN, 1500), (WIDE, 1500), ("\n", 10)),  # uint8 is too narrow, because of late characters
    ],
)
def test_tokens_are_indices_into_the_sorted_vocabulary(
    text: str, chunk_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_bytes(text.encode())
    monkeypatch.setattr(corpus, "CHUNK_SIZE", chunk_size)
    encoded = encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache")
    assert encoded.vocabulary == "".join(sorted(set(text)))
    assert decode(encoded) == text
    assert encoded.tokens.dtype == np.min_scalar_type(len(encoded.vocabulary) - 1)
    assert encoded.sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"/\*\.txt can't be read: FileNotFoundError: .*; it may be a file, a glob, or a URL that fsspec knows"),
        ([gzip.compress(b"words " * 99)], r"0\.txt is compressed by gzip: `gunzip` unpacks it"),
        ([b"words", b"PK\x03\x04\x14" + bytes(99)], r"1\.txt is a zip archive: `unzip` unpacks it"),
        ([codecs.BOM_UTF8, codecs.BOM_UTF8], r"0\.txt is empty"),
        ([b"ok \xff no"], r"0\.txt is not UTF-8 text: byte 3 is 0xff"),
        (["aé—🙂".encode() * 50, "aé—🙂".encode() * 50 + b"ok\xf0\x9f\x99", b"\x82 ok"], r"1\.txt .* byte 502 is 0xf0"),
    ],
)
def test_bad_text_is_refused_with_file_and_byte_and_writes_no_cache(
    files: list[bytes], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_SIZE", 5)
    for i, content in enumerate(files):
        (tmp_path / f"{i}.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        encode_corpus(f"{tmp_path}/*.txt", tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


FRENCH = "Le cœur a ses raisons – « déjà vu », l’été, à Noël.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"


@pytest.mark.parametrize(
    ("text", "encoding", "message"),
    [
        (FRENCH, "utf-16", "text.txt is UTF-16, by its byte-order mark: "),
        (FRENCH, "utf-16-le", "byte 48 is 0xab; it has NUL characters"),
        (FRENCH, "cp1252", "byte 4 is 0x9c; as CP1252 it reads 'œur a ses raisons – ' there: "),
        ("plain words in English, nothing else.\n" * 12 + JAPANESE, "euc-jp", "as EUC-JP it reads '吾輩は猫である。"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_advised_for_another_encoding_converts_it(
    text: str, encoding: str, message: str, tmp_path: Path
) -> None:
    text *= 9
    file, converted = tmp_path / "text.txt", tmp_path / "converted.txt"
    file.write_bytes(text.encode(encoding))
    with pytest.raises(UserError) as error:
        encode_corpus(str(file), tmp_path / "cache")
    assert message in str(error.value)
    iconv = str(error.value).split("`")[1].split()
    converted.write_bytes(subprocess.run(iconv, input=file.read_bytes(), capture_output=True, check=True).stdout)
    assert decode(encode_corpus(str(converted), tmp_path / "cache")) == text


def test_a_text_with_a_few_bytes_that_are_not_utf8_has_their_number(tmp_path: Path) -> None:
    part = FRENCH.encode() * 9
    (tmp_path / "1.txt").write_bytes(part)
    (tmp_path / "2.txt").write_bytes(part + b"\x92" + part + b"\xff")
    with pytest.raises(UserError, match=rf"2\.txt is .* byte {len(part)} is 0x92; all but 2 of its bytes are UTF-8"):
        encode_corpus(f"{tmp_path}/*.txt", tmp_path / "cache")


def test_byte_order_marks_of_utf8_are_no_characters_of_the_text(tmp_path: Path) -> None:
    for name, mark in (("with", codecs.BOM_UTF8), ("without", b"")):
        for i in range(2):
            (tmp_path / f"{name}{i}.txt").write_bytes(mark + FRENCH.encode())
    found, expected = (encode_corpus(f"{tmp_path}/{name}?.txt", tmp_path / name) for name in ("with", "without"))
    assert decode(found) == FRENCH * 2
    assert (found.vocabulary, found.sha256) == (expected.vocabulary, expected.sha256)


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    for name in ("book [1].txt", "book 1.txt"):
        (tmp_path / name).write_text(name)
    for name, pattern in (("book [1].txt", "book [1].txt"), ("book 1.txt", "book [01].txt")):
        assert decode(encode_corpus(f"{tmp_path}/{pattern}", tmp_path / "cache")) == name


def test_globs_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("b.txt", "second"), ("a.txt", "first "), ("c.md", "not this")):
        (tmp_path / name).write_text(content)
    assert decode(encode_corpus(f"{tmp_path}/*.txt", tmp_path / "glob")) == "first second"
    url = "memory://texts/far.txt"
    for content in ("far – away", "farther"):
        with fsspec.open(url, "wb") as file:
            file.write(content.encode())
        assert decode(encode_corpus(url, tmp_path / "url")) == content
        assert sorted(path.suffix for path in (tmp_path / "url").iterdir()) == [".bin", ".json"]

    def reset(*args: object, **options: object) -> None:
        raise OSError("connection reset")

    monkeypatch.setattr(MemoryFileSystem, "get_file", reset)
    assert decode(encode_corpus(url, tmp_path / "url")) == "farther"  # from the cache
    with pytest.raises(UserError, match=r"data\.path: /texts/far\.txt can't be fetched: OSError: connection reset; "):
        encode_corpus(url, tmp_path / "other")
    assert not list(tmp_path.glob("other/*"))


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.txt").symlink_to("none")
    for path, message in (
        ("*.txt", rf"\*\.txt can't be read: FileNotFoundError: .*No such file or directory: '{tmp_path}/b\.txt'"),
        ("", r"is not a file; for all files of a folder write .*/\*\.txt, in quotes"),
    ):
        with pytest.raises(UserError, match=message):
            check_text(f"{tmp_path}/{path}")


class TextServer(BaseHTTPRequestHandler):
    """Answers with a text, or with the status at the beginning of the path."""

    caplog: pytest.LogCaptureFixture
    messages: list[str]  # logged before the last request

    def do_HEAD(self) -> None:
        type(self).messages = list(self.caplog.messages)
        [status] = re.findall(r"^/(\d+)", self.path) or ["200"]
        self.send_response(int(status))
        self.send_header("Content-Length", "9")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(b"some text")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def text_server(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """The address of a TextServer."""
    TextServer.caplog = caplog
    with ThreadingHTTPServer(("127.0.0.1", 0), TextServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_a_server_says_is_shown(text_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mingpt"):
        check_text(f"{text_server}/text.txt?raw=1")
    assert TextServer.messages == [f"asking for {text_server}/text.txt?raw=1"]
    assert decode(encode_corpus(f"{text_server}/text.txt", tmp_path / "cache")) == "some text"
    for path, said in (
        ("404", "404, message='Not Found'"),
        ("503/*.txt", "503, message='Service Unavailable'"),
    ):
        with pytest.raises(UserError) as error:
            check_text(f"{text_server}/{path}")
        assert str(error.value).startswith(f"data.path: {text_server}/{path} can't be read: ")
        assert said in str(error.value)
    with pytest.raises(UserError, match=r"can't be read: ClientConnectorError: Cannot connect to host 127\.0\.0\.1:1"):
        check_text("http://127.0.0.1:1/text.txt")


def test_the_cache_is_used_until_the_text_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "text.txt", tmp_path / "cache"
    file.write_text("one text")
    first = encode_corpus(str(file), cache)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_tokens", None)  # encoding again would raise
        again = encode_corpus(str(file), cache)
    assert again.sha256 == first.sha256
    file.write_text("another")  # another size
    assert decode(encode_corpus(str(file), cache)) == "another"
    stat = file.stat()
    file.write_text("same size")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert decode(encode_corpus(str(file), cache)) == "same size"
    (cache / "text.json").write_text("{torn")
    assert decode(encode_corpus(str(file), cache)) == "same size"
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_is_cut_or_overwritten_does_not_change_a_text_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large texts are an exception: the processes of a machine share the file."""
    (tmp_path / "text.txt").write_text("some text")
    encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache")
    [file] = (tmp_path / "cache").glob("tokens-*.bin")
    used = [encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache", is_ready=ready) for ready in (False, True)]
    monkeypatch.setattr(corpus, "MAX_BYTES_IN_MEMORY", 8)
    large = encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache")
    assert isinstance(large.tokens.base, np.memmap)
    assert decode(large) == "some text"
    os.truncate(file, 3)
    assert list(map(decode, used)) == ["some text", "some text"]


@pytest.mark.parametrize("value", [3, 200])
def test_a_damaged_cache_is_named_and_made_again(value: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token is changed to another token, or to a number outside of the vocabulary."""
    file, cache = tmp_path / "text.txt", tmp_path / "cache"
    file.write_text("some text")
    encode_corpus(str(file), cache)
    [tokens] = cache.glob("tokens-*.bin")
    content = bytearray(tokens.read_bytes())
    content[-1] = value
    tokens.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="mingpt"):
        assert decode(encode_corpus(str(file), cache)) == "some text"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"the text's cache in {cache} is damaged: its bytes do not match their SHA-256"
    ]
    assert decode(encode_corpus(str(file), cache)) == "some text"


def test_extra_characters_are_in_the_vocabulary_and_their_key_identifies_the_cache(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    path, cache = str(tmp_path / "text.txt"), tmp_path / "cache"
    for extra, key in (("zé", "one"), ("🙂", "other"), ("", "")):
        encoded = encode_corpus(path, cache, extra, key)
        assert encoded.vocabulary == "".join(sorted({*"some text", *extra}))
        assert decode(encoded) == "some text"
        assert encode_corpus(path, cache, "#", key).vocabulary == encoded.vocabulary  # from the cache


@pytest.mark.parametrize("content", ["txet emos", "some", "ßöme text"])
def test_a_text_that_changes_between_the_passes_is_refused(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes changes that keep the length and the set of characters."""
    file, cache = tmp_path / "text.txt", tmp_path / "cache"
    file.write_text("some text")
    write_tokens = corpus._write_tokens

    def change_text(*args: Any) -> str:
        file.write_text(content, encoding="utf-8")
        return write_tokens(*args)

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_tokens", change_text)
        with pytest.raises(UserError, match=r"data\.path: .*text\.txt has changed while it was encoded; start again"):
            encode_corpus(str(file), cache)
    assert not list(cache.iterdir())
    file.write_text("some text")
    assert decode(encode_corpus(str(file), cache)) == "some text"


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "cache/text.json").mkdir(parents=True)
    with pytest.raises(UserError, match=r"data\.path: .*text\.txt can't be encoded into .*cache: .*; make room there"):
        encode_corpus(str(tmp_path / "text.txt"), tmp_path / "cache")
    with pytest.raises(UserError, match=r"^trainer\.run_dir: .*text\.txt/cache can't be created: Not a directory; set"):
        encode_corpus(str(tmp_path / "text.txt"), tmp_path / "text.txt/cache")


KILL_AT_CALL = """
import os, signal, sys
from pathlib import Path
from mingpt.text.corpus import encode_corpus
_, text, cache, name, calls = sys.argv
remaining = [getattr(os, name)] * int(calls)
setattr(os, name, lambda *args: remaining.pop()(*args) if remaining else os.kill(os.getpid(), signal.SIGKILL))
encode_corpus(text, Path(cache), "#", "other characters")
"""
# The peak of getrusage would include the memory of the process that starts the script.
MEMORY = """
import re, sys
from pathlib import Path
from mingpt.text import corpus
corpus.MAX_BYTES_IN_MEMORY = 0
corpus.encode_corpus(sys.argv[1], Path(sys.argv[2]))
print(re.search("VmHWM: *(.*) kB", Path("/proc/self/status").read_text().expandtabs(1))[1])
"""


def run_script(script: str, *args: object) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, env=clean_env(), cwd=ROOT, check=False, timeout=120)


@pytest.mark.parametrize(("function", "calls"), [("fsync", 0), ("replace", 0), ("replace", 1)])
def test_a_kill_while_encoding_leaves_nothing_wrong(function: str, calls: int, tmp_path: Path) -> None:
    """The kill comes before the tokens are on disk, before they are renamed, or before the index is renamed."""
    file, cache = tmp_path / "text.txt", tmp_path / "cache"
    file.write_text("one text")
    encode_corpus(str(file), cache)
    assert run_script(KILL_AT_CALL, file, cache, function, calls).returncode == -signal.SIGKILL
    assert list(cache.glob("*.tmp"))
    assert decode(encode_corpus(str(file), cache)) == "one text"
    file.write_text("another text")
    assert decode(encode_corpus(str(file), cache)) == "another text"
    assert len(list(cache.iterdir())) == 2


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Except for the tokens, which are in memory unless there are many."""
    line = "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. " * 1000
    peaks = []
    for megabytes in (20, 200):
        with open(tmp_path / "text.txt", "w", encoding="utf-8") as file:
            for _ in range(megabytes * 10**6 // len(line.encode())):
                file.write(line)
        done = run_script(MEMORY, tmp_path / "text.txt", tmp_path / f"cache{megabytes}")
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] < peaks[0] + 30_000  # kilobytes
