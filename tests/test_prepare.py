"""data/prepare.py: Python's documentation without a network, tiny shakespeare with one."""

import os
import platform
import re
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.helpers import ROOT, run_program

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak – or not.\n".encode()


def prepare(folder: Path, *argv: str, env: dict[str, str] | None = None, **values: str) -> CompletedProcess:
    """Runs a copy of data/prepare.py in `folder`, with other values for these constants."""
    source = (ROOT / "data/prepare.py").read_text()
    for name, value in values.items():
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
    done = prepare(tmp_path, env={"PYTHONHASHSEED": "2", "PYTHONUTF8": "1"})
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


def test_shakespeare_is_downloaded_into_the_program_folder_or_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(TEXT)
    done = prepare(tmp_path, "shakespeare", SHAKESPEARE=repr((tmp_path / "source").as_uri()))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "shakespeare.txt").read_bytes() == TEXT
    assert f"shakespeare.txt: tiny shakespeare, {len(TEXT.decode())} characters" in done.stdout
    url = "http://127.0.0.1:9/none"  # a closed port
    done = prepare(tmp_path, "shakespeare", SHAKESPEARE=repr(url))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {url} can't be downloaded: ")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "shakespeare.txt").read_bytes() == TEXT
