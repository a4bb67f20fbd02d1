"""data/prepare.py: Python's documentation without a network, tiny shakespeare with one."""

import hashlib
import os
import platform
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.helpers import ROOT, run_program

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak – or not.\n".encode()
SHA256 = hashlib.sha256(TEXT).hexdigest()
CLOSED_PORT = "http://127.0.0.1:9/none"


class Handler(BaseHTTPRequestHandler):
    """Serves /text, and /cut, which is shorter than announced."""

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


def prepare(folder: Path, *argv: str, env: dict[str, str] | None = None, **values: str) -> CompletedProcess:
    """Runs a copy of data/prepare.py in `folder`, with other values for these constants."""
    source = (ROOT / "data/prepare.py").read_text()
    for name, value in ({"SHAKESPEARE": repr(CLOSED_PORT), "SHAKESPEARE_SHA256": repr(SHA256)} | values).items():
        source, count = re.subn(f"^{name} = .*", f"{name} = {value}", source, flags=re.MULTILINE)
        assert count == 1
    copy = folder / "prepare.py"
    copy.write_text(source)
    done = run_program(str(copy), *argv, cwd=folder, **env or {})
    copy.unlink()
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return done


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The default text, and stdout."""
    folder = tmp_path_factory.mktemp("documentation")
    done = prepare(folder, env={"PYTHONHASHSEED": "1", "LC_ALL": "C"})
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(folder) == ["input.txt"]
    return (folder / "input.txt").read_text(encoding="ascii"), done.stdout


def test_documentation_is_prose(documentation: tuple[str, str]) -> None:
    text, stdout = documentation
    version = platform.python_version()
    described = f"prose of Python {version}'s documentation, {len(text):,} characters, {len(set(text))} distinct\n"
    assert stdout == f"input.txt: {described}"
    assert 500_000 < len(text) < 1_500_000
    assert len(set(text)) < 100
    words = re.findall("[a-z]+", text.lower())
    assert words.count("the") / len(words) > 0.06  # about one in sixteen in English
    paragraphs = text.removesuffix("\n").split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 5000
    for paragraph in paragraphs:
        assert re.match("[A-Z]", paragraph), paragraph
        assert re.search(r"""[.!?]["')]?$""", paragraph), paragraph
        assert all(0 < len(line) <= 72 and line == line.strip() for line in paragraph.split("\n")), paragraph


def test_documentation_does_not_depend_on_hash_seed_locale_and_folder(
    documentation: tuple[str, str], tmp_path: Path
) -> None:
    done = prepare(tmp_path, env={"PYTHONHASHSEED": "2", "PYTHONUTF8": "1", "PYTHONOPTIMIZE": "2"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "input.txt").read_bytes() == documentation[0].encode()


DOCUMENT = '''"""Keep this sentence of a module, with ``code``, *emphasis* and :class:`~names`.

Say what follows in one sentence. The code that comes here is left out::

    This paragraph would be prose, if it was not indented under two colons.

Title of a section
------------------

Signature(name, mode)
    This line describes a signature, or a row of a list.

    Keep this indented paragraph of two lines, since nothing
    before it says that it is code [1]_.

>>> print("Here is a test, which has words as well.")
Here is a test, which has words as well.

Set x = {key: [1, 2, 3]} and y = x ** 2 | 7 in this line of symbols.

Call a(1, 2), b(3, 4), c(5, 6), d(7, 8), e(9, 10) and f(11, 12) here.

Short is bad.

:param name: This line has a sentence, but it describes a parameter.
"""

class Outer:
    """Keep this sentence of a class, and never keep it twice."""

    if True:
        async def method(self):
            """Keep this sentence of a class, and never keep it twice."""
'''
KEPT = """Keep this sentence of a module, with code, emphasis and names.

Say what follows in one sentence.

Keep this indented paragraph of two lines, since nothing before it says
that it is code.

Keep this sentence of a class, and never keep it twice.
"""


def write_library(folder: Path) -> Path:
    """Writes a library with one file that counts and several that do not; returns its folder."""
    other = '"""Leave this sentence out, since not every Python has this file."""'
    files = {"pydoc_data/topics.py": "topics = {}", "json/tool.py": DOCUMENT}
    files |= dict.fromkeys(("json/tests/tool.py", "tkinter/font.py", "unknown.py", "site.py"), other)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_paragraphs_that_are_no_prose_are_left_out(tmp_path: Path) -> None:
    library = write_library(tmp_path / "library")
    done = prepare(tmp_path, LIBRARY=f"Path({str(library)!r})")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "input.txt").read_text() == KEPT


def test_a_python_without_sources_is_refused_in_one_message(tmp_path: Path) -> None:
    done = prepare(tmp_path, LIBRARY=f"Path({str(tmp_path)!r})")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} does not contain the sources of Python's library")
    assert os.listdir(tmp_path) == []


def test_shakespeare_is_downloaded_into_the_program_folder(server: str, tmp_path: Path) -> None:
    done = prepare(tmp_path, "shakespeare", SHAKESPEARE=repr(f"{server}/text"))
    assert (done.returncode, done.stderr) == (0, "")  # a pipe gets no progress bar
    assert os.listdir(tmp_path) == ["shakespeare.txt"]
    assert (tmp_path / "shakespeare.txt").read_bytes() == TEXT
    assert f"shakespeare.txt: tiny shakespeare, {len(TEXT.decode())} characters" in done.stdout


@pytest.mark.parametrize(
    ("url", "sha256", "message"),
    [
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
    done = prepare(tmp_path, "shakespeare", SHAKESPEARE=repr(url), SHAKESPEARE_SHA256=repr(sha256))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "error: " in line]
    assert line.startswith(f"error: {url} {message}")  # begins a line, after any bar
    assert os.listdir(tmp_path) == ["shakespeare.txt"]
    assert (tmp_path / "shakespeare.txt").read_text() == "an earlier one"
