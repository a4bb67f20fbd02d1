"""data/prepare.py: Python's documentation without a network, tiny shakespeare with one."""

import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import ROOT, run_program

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak – or not.\n".encode()
SHA256 = hashlib.sha256(TEXT).hexdigest()
CLOSED_PORT = "http://127.0.0.1:9/none"


class Handler(BaseHTTPRequestHandler):
    """Serves /text; /cut is shorter than announced, other paths are missing."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/text", "/cut") else 404)
        self.send_header("Content-Length", str(len(TEXT) + (9 if self.path == "/cut" else 0)))
        self.end_headers()
        self.wfile.write(TEXT)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


def prepare(folder: Path, *argv: str, url: str = CLOSED_PORT, sha256: str = SHA256) -> subprocess.CompletedProcess:
    """Runs a copy of data/prepare.py in `folder`, with another address and another digest of the download."""
    source = (ROOT / "data/prepare.py").read_text()
    for name, value in (("SHAKESPEARE", url), ("SHAKESPEARE_SHA256", sha256)):
        source, count = re.subn(f"^{name} = .*", f"{name} = {value!r}", source, flags=re.MULTILINE)
        assert count == 1
    copy = folder / "prepare.py"
    copy.write_text(source)
    done = run_program(str(copy), *argv, cwd=folder)
    copy.unlink()
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return done


def test_documentation_is_english_text_and_the_same_each_time(tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        done = prepare(tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert os.listdir(tmp_path) == ["input.txt"]
        texts.append((tmp_path / "input.txt").read_bytes())
    assert texts[0] == texts[1]
    text = texts[0].decode("utf-8")
    assert len(text) > 400_000
    assert f"input.txt: {len(text):,} characters, {len(set(text))} distinct" in done.stdout
    words = text.lower().split()
    assert words.count("the") / len(words) > 0.03  # about one in twenty in English
    assert text.count("\n\n") > 1000  # paragraphs


def test_shakespeare_is_downloaded_into_the_program_folder(server: str, tmp_path: Path) -> None:
    done = prepare(tmp_path, "shakespeare", url=f"{server}/text")
    assert (done.returncode, done.stderr) == (0, "")  # no bar in a pipe
    assert os.listdir(tmp_path) == ["shakespeare.txt"]
    assert (tmp_path / "shakespeare.txt").read_bytes() == TEXT
    assert f"shakespeare.txt: {len(TEXT.decode())} characters" in done.stdout


@pytest.mark.parametrize(
    ("url", "sha256", "message"),
    [
        (CLOSED_PORT, SHA256, "can't be downloaded"),
        ("SERVER/missing", SHA256, "can't be downloaded"),
        ("SERVER/cut", SHA256, "can't be downloaded"),
        ("SERVER/text", "0" * 64, f"has SHA-256 {SHA256}, expected {'0' * 64}"),
    ],
)
def test_a_failed_download_is_one_message_and_writes_nothing(
    url: str, sha256: str, message: str, server: str, tmp_path: Path
) -> None:
    url = url.replace("SERVER", server)
    (tmp_path / "shakespeare.txt").write_text("an earlier one")
    done = prepare(tmp_path, "shakespeare", url=url, sha256=sha256)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "error: " in line]
    assert line.startswith(f"error: {url} {message}")  # begins a line, after any bar
    assert os.listdir(tmp_path) == ["shakespeare.txt"]
    assert (tmp_path / "shakespeare.txt").read_text() == "an earlier one"
