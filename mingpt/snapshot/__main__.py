"""Lists snapshots, with fingerprints to compare two runs by: python -m mingpt.snapshot PATH."""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
import zlib
from datetime import datetime, timezone

import fsspec

from mingpt.snapshot.storage import (
    NAME,
    DamagedSnapshotError,
    SnapshotStorage,
    _words,
    fingerprint,
    load_snapshot,
    local_copy,
)
from mingpt.utils.errors import UserError


def where_damaged(path: str) -> str:
    """The tensor or other part of a damaged snapshot in which bytes have changed, as far as its parts can tell."""
    with local_copy(path) as name:
        try:
            with zipfile.ZipFile(name) as archive:
                part = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, zlib.error):
            return "cut short, or in the list of its parts"
    return f"in its part {part}" if part else "outside of its parts' contents"


def describe(path: str) -> list[str]:
    """Step, when, bytes, validation loss, state and fingerprints of a snapshot, for a person."""
    fs, name = fsspec.url_to_fs(path)
    facts = fs.info(name)
    when = facts.get("mtime", facts.get("LastModified", facts.get("created", "")))
    if isinstance(when, float):
        when = datetime.fromtimestamp(when, timezone.utc)
    row = [match[1].lstrip("0") or "0"] if (match := NAME.fullmatch(os.path.basename(name))) else ["?"]
    row += [f"{when:%Y-%m-%d %H:%M:%S} UTC" if when else "", f"{facts['size']:,}"]
    try:
        snapshot = load_snapshot(path)
    except DamagedSnapshotError as error:
        return [*row, "", f"DAMAGED: {error}; {where_damaged(path)}"]
    except UserError as error:
        return [*row, "", str(error)]
    val_loss = "" if snapshot["val_loss"] is None else f"{snapshot['val_loss']:.4f}"
    return [*row, val_loss, "whole", fingerprint(snapshot["model"]), fingerprint(snapshot["optimizer"])]


def describe_all(path: str) -> list[list[str]]:
    """`describe` of the snapshots in a run folder or a folder of snapshots, or of one file.

    Raises:
        UserError: there is none, or it can't be read.
    """
    try:
        folders = [SnapshotStorage(place, keep=1) for place in (path, f"{path}/snapshots")]
        files = [folder.file(step) for folder in folders for step in folder.steps()]
        return [describe(file) for file in files or [path]]
    except OSError as error:
        raise UserError(
            f"PATH: no snapshot at {path}: {_words(error)}; main.py makes them in its run folder"
        ) from error


def main() -> int:
    """Lists snapshots; exit status 1 if one is damaged, 2 if there is none."""
    parser = argparse.ArgumentParser(description="Lists snapshots, with fingerprints to compare two runs by.")
    parser.add_argument("path", metavar="PATH", help="a run folder, a folder of snapshots or one file; may be a URL")
    path = parser.parse_args().path.rstrip("/")
    try:
        rows = describe_all(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows.insert(0, ["step", "written", "bytes", "val_loss", "state", "weights", "optimizer"])
    widths = [max(len(row[i]) for row in rows if i < len(row) and len(row[i]) < 40) for i in range(7)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    return int(any(row[4] != "whole" for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
