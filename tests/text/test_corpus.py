"""Texts are read from files, globs and URLs, or refused in one message."""

import bz2
import codecs
import gzip
import hashlib
import lzma
import math
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from mingpt.config.schema import DataConfig
from mingpt.errors import UserError
from mingpt.text.corpus import Corpus, is_token_folder, open_folder, write_run_tokens
from mingpt.text.tokenizer import CharTokenizer
from tests.inside import prepare_text


def read(path: Path | str, vocabulary: str = "", block_size: int = 1, train_split: float = 0.5) -> Corpus:
    """Returns the tokens of a new run on a text, or of a folder of token files."""
    data = DataConfig(path=str(path), block_size=block_size, train_split=train_split)
    if is_token_folder(str(path)):
        return open_folder(Path(path), data)
    with TemporaryDirectory() as folder:
        write_run_tokens(data, Path(folder), CharTokenizer(vocabulary), is_new=True)
        return open_folder(Path(folder), data)


def tokens_of(corpus: Corpus) -> np.ndarray:
    return np.concatenate([corpus.training[:], corpus.validation[:]])


def decode(corpus: Corpus) -> str:
    return corpus.tokenizer.decode(tokens_of(corpus))


@pytest.mark.parametrize("text", ["hello\r\n", "naïve – “quoted” 🙂" * 20, "".join(map(chr, range(1, 0xD800))) + "a"])
def test_tokens_are_indices_into_the_sorted_vocabulary_which_rebuilds_the_tokenizer(text: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(text.encode())
    for extra in ("", "zé🙂"):
        encoded = read(tmp_path / "text.txt", extra)
        vocabulary = encoded.tokenizer.vocabulary
        assert vocabulary == "".join(sorted({*text, *extra}))
        assert decode(encoded) == text
        rebuilt, tokens = CharTokenizer(vocabulary), tokens_of(encoded)
        assert tokens.tolist() == [vocabulary.index(character) for character in text]
        assert tokens.tolist() == rebuilt.encode(text, "prompt").tolist()
        assert rebuilt.decode(tokens) == text
        assert encoded.entries["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert encoded.validation_bytes == len(text[len(encoded.training) :].encode())
        bits = encoded.bits_per_byte(math.log(2))  # a bit per token
        assert bits == pytest.approx(len(encoded.validation) / encoded.validation_bytes)


PROSE = "Le cœur a ses raisons – « déjà vu », l’été, à Noël.\n" * 9


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"\*\.txt is no file"),
        ([b"words\0"], r"0\.txt is no text, but has NUL characters "),
        ([b"version https://git-lfs.github.com/spec/v1\n"], r"0\.txt is no text, .* `git lfs pull`"),
        ([b"ok \xff no"], r"0\.txt is not UTF-8 text: .* 0xff .*`iconv -f ENCODING -t UTF-8` converts it"),
        (
            ["aé—🙂".encode() * 50, "aé—🙂".encode() * 50 + b"ok\xf0\x9f\x99", b"\x82 ok"],
            r"1\.txt is not UTF-8 text: .* unexpected end of data",
        ),
        ([PROSE.encode("utf-16")], r"0\.txt is not UTF-8 text: .* 0xff"),
        ([gzip.compress(b"words")], r"0\.txt .* 0x8b .* its name must end in \.gz, \.bz2 or \.xz"),
    ],
)
def test_a_bad_text_is_refused_with_its_file(files: list[bytes], message: str, tmp_path: Path) -> None:
    for i, content in enumerate(files):
        (tmp_path / f"{i}.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"^data\.path: {tmp_path}/{message}"):
        read(f"{tmp_path}/*.txt")


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files_are_read_and_damaged_ones_are_named(suffix: str, compress: type, tmp_path: Path) -> None:
    content = compress(PROSE.encode())
    file = tmp_path / f"text.{suffix}"
    file.write_bytes(content)
    assert decode(read(file)) == PROSE
    message = rf"^data\.path: {file} can.t be read: (EOFError|BadGzipFile|OSError|LZMAError)"
    for damaged in (content[: len(content) // 2], b"x" + content[1:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            read(file)
    file.write_bytes(compress(PROSE.encode() + b"\xff"))
    with pytest.raises(UserError, match="0xff"):
        read(file)


def test_patterns(tmp_path: Path) -> None:
    names = ("a.txt", "b/c.txt", "book [1].md", "book 1.md")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + f"{name} ".encode())  # the mark is no character of the text
    for pattern, expected in (
        ("a*.txt", "a.txt "),
        ("b/**/*.txt", "b/c.txt "),
        ("book [1].md", "book [1].md "),  # a file whose name is a pattern
    ):
        assert decode(read(f"{tmp_path}/{pattern}")) == expected, pattern


class TextServer(BaseHTTPRequestHandler):
    """Answers with a text, or with the status at the beginning of the path. It knows no ranges. /cut ends early."""

    text = "some text – with words\n" * 250_000  # more than a block of fsspec

    def do_GET(self) -> None:
        [status] = re.findall(r"^/(\d+)", self.path) or ["200"]
        content = gzip.compress(self.text.encode(), 0) if "gz" in self.path else self.text.encode()
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(content) + (self.path == "/cut")))
        self.end_headers()
        with suppress(OSError):  # fsspec may only ask whether there is a file
            self.wfile.write(content if self.command == "GET" else b"")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def text_server() -> Iterator[str]:
    """The address of a TextServer."""
    with ThreadingHTTPServer(("127.0.0.1", 0), TextServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_sends_the_whole_text_or_its_error_is_shown(text_server: str, tmp_path: Path) -> None:
    assert decode(read(f"{text_server}/text.txt?raw=1")) == TextServer.text
    prepare_text(f"{text_server}/text.gz", tmp_path / "tokens", "char")
    assert decode(read(tmp_path / "tokens")) == TextServer.text
    for path, said in (
        ("404", "404, message='Not Found'"),
        ("503/*.txt", "503, message='Service Unavailable'"),
        ("cut", "Not enough data to satisfy content length header"),
    ):
        url = f"{text_server}/{path}"
        with pytest.raises(UserError, match=rf"(?s)^data\.path: {re.escape(url)} can't be read: .*{said}"):
            read(url)


def test_text_too_short_for_a_window_is_refused_in_either_split(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab" * 50)
    path = tmp_path / "text.txt"
    assert len(read(path, block_size=9, train_split=0.9).validation) == 10
    for block_size, split, message in ((10, 0.9, "validation part .* has 10 "), (9, 0.09, "training part .* has 9 ")):
        with pytest.raises(UserError, match=message):
            read(path, block_size=block_size, train_split=split)
