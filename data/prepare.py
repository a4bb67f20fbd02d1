"""Writes a training text: prose from Python's documentation, without a network, or tiny shakespeare, by download."""

import argparse
import ast
import hashlib
import http.client
import os
import re
import runpy
import sys
import sysconfig
import textwrap
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).parent
LIBRARY = Path(sysconfig.get_path("stdlib"))
# Modules that some distributions leave out or patch, and modules for a single platform
OMITTED = {"distutils", "ensurepip", "idlelib", "lib2to3", "macholib", "msilib", "site", "sysconfig", "test", "tests"}
OMITTED |= {"this", "tkinter", "turtledemo", "venv", "_vendor"}
WIDTH = 72  # characters per line
MIN_LETTERS = 0.92  # fraction of letters and spaces in a paragraph
SENTENCES = re.compile(r"""(?=(\S+ ){5})[A-Z][A-Za-z0-9 ,.;:!?'"()/_-]*[.!?]["')]?""")
MARKUP = (
    (r":[\w:]+:`[~!]?([^`<]*?)(?: *<[^`]*>)?`", r"\1"),  # :class:`name`
    (r"``([^`]*)``|`([^`']*)['`]_*", r"\1\2"),  # ``code``, `name`, `name'
    (r"(?<!\w)(\*\*?)(\w[^*]*)\1(?!\w)", r"\2"),  # *emphasis*
    (r" \[\d+\]_?", ""),  # footnotes
    (r"(?<=[.!?]) [^.!?]*:+$", ""),  # a last sentence that introduces code or a list
)
ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def documentation() -> None:
    """Writes English prose from Python: the topics of help() and the docstrings of the standard library."""
    topics = LIBRARY / "pydoc_data/topics.py"
    if not topics.is_file():
        fail(f"{LIBRARY} does not contain the sources of Python's library; use a Python that includes them")
    texts = [*runpy.run_path(str(topics))["topics"].values()]
    for file in library_files():
        # Under -OO, ast.parse of Python 3.14 drops docstrings.
        texts += docstrings(compile(file.read_bytes(), file, "exec", ast.PyCF_ONLY_AST, optimize=0))
    unique = dict.fromkeys(paragraph for text in texts for paragraph in prose(text))
    text = "\n\n".join(textwrap.fill(paragraph, WIDTH, break_on_hyphens=False) for paragraph in unique)
    version = ".".join(map(str, sys.version_info[:3]))
    write(f"{text}\n".encode(), "input.txt", f"prose of Python {version}'s documentation")


def library_files() -> Iterator[Path]:
    """Yields the source files of the standard library, the same and in the same order on all platforms."""
    for name in sorted(sys.stdlib_module_names - OMITTED):
        files = [LIBRARY / f"{name}.py", *(LIBRARY / name).rglob("*.py")]
        for file in sorted(files, key=lambda file: file.relative_to(LIBRARY).as_posix()):
            if file.is_file() and OMITTED.isdisjoint(file.relative_to(LIBRARY).parts):
                yield file


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings of a module and of the classes and functions in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    for child in getattr(node, "body", []):
        yield from docstrings(child)


def prose(text: str) -> Iterator[str]:
    """Yields the paragraphs of a reStructuredText document that are sentences, each on one line, without markup."""
    literal_indent = sys.maxsize  # indentation of a paragraph that ends in "::"; deeper indentation is code
    for block in re.split(r"\n\s*\n", text.expandtabs().translate(ASCII)):
        lines = block.strip("\n").splitlines() or [""]
        indents = {len(line) - len(line.lstrip()) for line in lines}
        if min(indents) > literal_indent:
            continue
        literal_indent = min(indents) if block.rstrip().endswith("::") else sys.maxsize
        paragraph = " ".join(block.split())
        for pattern, replacement in MARKUP:
            paragraph = re.sub(pattern, replacement, paragraph)
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        # The lines of lists, tables and signatures differ in their indentation.
        if len(indents) == 1 and SENTENCES.fullmatch(paragraph) and letters >= MIN_LETTERS * len(paragraph):
            yield paragraph


def shakespeare() -> None:
    """Writes tiny shakespeare (public domain): 1,115,394 characters, 65 distinct."""
    try:
        with urllib.request.urlopen(SHAKESPEARE, timeout=60) as response:
            text = response.read()
    except (OSError, http.client.HTTPException) as error:
        fail(f"{SHAKESPEARE} can't be downloaded: {error}; is there a network?")
    found = hashlib.sha256(text).hexdigest()
    if found != SHAKESPEARE_SHA256:
        fail(f"{SHAKESPEARE} has SHA-256 {found}, expected {SHAKESPEARE_SHA256}; nothing was written: try again")
    write(text, "shakespeare.txt", "tiny shakespeare")


def write(text: bytes, name: str, description: str) -> None:
    """Writes the complete file or nothing. Other machines may write the same file at the same time."""
    target = FOLDER / name
    unfinished = FOLDER / f"{name}.{uuid.uuid4().hex}.tmp"
    try:
        unfinished.write_bytes(text)
        os.replace(unfinished, target)
    except OSError as error:
        fail(f"{target} can't be written: {error.strerror}; make {FOLDER} writable")
    finally:
        unfinished.unlink(missing_ok=True)
    characters = text.decode()
    print(f"{os.path.relpath(target)}: {description}, {len(characters):,} characters, {len(set(characters))} distinct")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    texts = {"documentation": documentation, "shakespeare": shakespeare}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="documentation", choices=texts)
    texts[parser.parse_args().text]()
