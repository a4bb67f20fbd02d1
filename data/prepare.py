"""Writes training text: Python's own documentation, without a network, or tiny shakespeare, which is downloaded."""

import argparse
import hashlib
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import NoReturn

import fsspec
from fsspec.callbacks import TqdmCallback

FOLDER = Path(__file__).parent
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def documentation() -> None:
    """The English reference text that ships with Python (`help("assert")` shows a part), the same for each version."""
    write("\n\n".join(topics[name].strip() for name in sorted(topics)).encode() + b"\n", "input.txt")


def shakespeare() -> None:
    """Tiny shakespeare (public domain): 1,115,394 characters, 65 distinct."""
    fs, path = fsspec.url_to_fs(SHAKESPEARE)
    download = FOLDER / "shakespeare.download"
    try:
        with TqdmCallback(tqdm_kwargs={"unit": "B", "unit_scale": True, "disable": None}) as progress:
            fs.get_file(path, str(download), callback=progress)
        text = download.read_bytes()
    except Exception as error:  # each kind of network failure raises its own
        fail(f"{SHAKESPEARE} can't be downloaded: {error or type(error).__name__}; is there a network?")
    finally:
        download.unlink(missing_ok=True)
    found = hashlib.sha256(text).hexdigest()
    if found != SHAKESPEARE_SHA256:
        fail(f"{SHAKESPEARE} has SHA-256 {found}, expected {SHAKESPEARE_SHA256}; nothing was written: try again")
    write(text, "shakespeare.txt")


def write(text: bytes, name: str) -> None:
    """Writes the whole file or nothing."""
    target = FOLDER / name
    unfinished = target.with_suffix(".tmp")
    unfinished.write_bytes(text)
    os.replace(unfinished, target)
    print(f"{os.path.relpath(target)}: {len(text.decode()):,} characters, {len(set(text.decode()))} distinct")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    texts = {"documentation": documentation, "shakespeare": shakespeare}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="documentation", choices=texts)
    texts[parser.parse_args().text]()
