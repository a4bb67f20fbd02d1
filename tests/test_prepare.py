"""Where text comes from: Python's documentation without a network, tiny shakespeare with one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import ROOT, run_program

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak – or not.\n".encode()
NOWHERE = "http://127.0.0.1:9/none"  # nobody listens there


class Library(BaseHTTPRequestHandler):
    """A web server with one play, and a shelf of troubles."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/play", "/cut") else 404)
        self.send_header("Content-Length", str(len(PLAY) + (9 if self.path == "/cut" else 0)))
        self.end_headers()
        self.wfile.write(PLAY)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def library() -> Iterator[str]:
    """The server's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Library) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def prepare(
    folder: Path, *argv: str, url: str = NOWHERE, sha256: str = hashlib.sha256(PLAY).hexdigest()
) -> subprocess.CompletedProcess:
    """Runs a copy of data/prepare.py in `folder` that knows another address of the play, and another digest."""
    lines = (ROOT / "data/prepare.py").read_text().splitlines()
    changed = {"SHAKESPEARE = ": f"SHAKESPEARE = {url!r}", "SHAKESPEARE_SHA256 = ": f"SHAKESPEARE_SHA256 = {sha256!r}"}
    for start, line in changed.items():
        [place] = [i for i, old in enumerate(lines) if old.startswith(start)]
        lines[place] = line
    copy = folder / "prepare.py"
    copy.write_text("\n".join(lines))
    done = run_program(str(copy), *argv, cwd=folder)
    copy.unlink()
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return done


def test_the_documentation_is_much_english_and_the_same_each_time(tmp_path: Path) -> None:
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
    assert sum(character.isascii() and (character.isalpha() or character.isspace()) for character in text) > 0.8 * len(
        text
    )
    assert text.count("\n\n") > 1000  # paragraphs


def test_the_play_is_downloaded_beside_the_program(library: str, tmp_path: Path) -> None:
    done = prepare(tmp_path, "shakespeare", url=f"{library}/play")
    assert (done.returncode, done.stderr) == (0, "")  # no bar in a pipe
    assert os.listdir(tmp_path) == ["shakespeare.txt"]
    assert (tmp_path / "shakespeare.txt").read_bytes() == PLAY
    assert f"shakespeare.txt: {len(PLAY.decode())} characters" in done.stdout


@pytest.mark.parametrize(
    ("page", "said"),
    [(NOWHERE, "can't be downloaded"), ("/missing", "can't be downloaded"), ("/cut", "can't be downloaded")],
)
def test_a_download_that_fails_is_one_message(page: str, said: str, library: str, tmp_path: Path) -> None:
    url = page if page == NOWHERE else library + page
    (tmp_path / "shakespeare.txt").write_text("an older one")
    assert_refused(prepare(tmp_path, "shakespeare", url=url), f"{url} {said}", tmp_path)


def test_other_bytes_than_expected_are_not_taken(library: str, tmp_path: Path) -> None:
    url, expected = f"{library}/play", "0" * 64
    (tmp_path / "shakespeare.txt").write_text("an older one")
    done = prepare(tmp_path, "shakespeare", url=url, sha256=expected)
    assert_refused(done, f"{url} has SHA-256 {hashlib.sha256(PLAY).hexdigest()}, expected {expected}", tmp_path)


def assert_refused(done: subprocess.CompletedProcess, message: str, folder: Path) -> None:
    """One message, status 2, and nothing written."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]  # not behind a bar
    assert line.startswith(f"error: {message}")
    assert done.stdout == ""
    assert os.listdir(folder) == ["shakespeare.txt"]
    assert (folder / "shakespeare.txt").read_text() == "an older one"


def test_a_text_that_nobody_has_is_refused(tmp_path: Path) -> None:
    done = prepare(tmp_path, "goethe")
    assert done.returncode == 2
    for words in ("goethe", "documentation", "shakespeare"):
        assert words in done.stderr
    assert os.listdir(tmp_path) == []
