"""Lists snapshots with fingerprints, by which two runs are compared: python -m mingpt.snapshot PATH."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import fsspec

from mingpt.errors import UserError
from mingpt.program import run_program
from mingpt.snapshot.storage import SNAPSHOT_NAME, DamagedSnapshotError, SnapshotStorage, fingerprint, load_snapshot

COLUMNS = ["step", "written", "bytes", "val_loss", "state", "weights", "optimizer"]


def describe(path: str) -> list[str]:
    """Returns the cells of a snapshot's row, without the last ones if it can't be loaded.

    Raises:
        FileNotFoundError: there is no such file.
    """
    fs, name = fsspec.url_to_fs(path)
    size = f"{fs.size(name):,}"
    written = ""
    with suppress(NotImplementedError):  # of file systems that do not know it
        written = f"{fs.modified(name).astimezone():%Y-%m-%d %H:%M}"
    match = SNAPSHOT_NAME.fullmatch(os.path.basename(name))
    shown_step = "?"
    if match is not None:
        prefix, step = match.groups()
        shown_step = f"{int(step)}{' frequent' if prefix == 'frequent' else ''}"
    row = [shown_step, written, size]
    try:
        snapshot = load_snapshot(path)
    except DamagedSnapshotError as error:
        return [*row, "", f"DAMAGED: {error}"]
    except (OSError, UserError) as error:
        return [*row, "", str(error)]
    val_loss = "" if snapshot["val_loss"] is None else f"{snapshot['val_loss']:.4f}"
    return [*row, val_loss, "whole", fingerprint(snapshot["model"]), fingerprint(snapshot["optimizer"])]


def describe_all(path: str) -> list[list[str]]:
    """Returns a row for each snapshot in a run folder or a folder of snapshots, or for one file."""
    try:
        folder = SnapshotStorage(path, keep=1)
        files = [path]
        if folder.fs.isdir(folder.root):
            storages = [
                SnapshotStorage(name, keep=1, is_frequent=is_frequent)
                for name in (path, f"{path}/snapshots")
                for is_frequent in (False, True)
            ]
            files = [storage.file(step) for storage in storages for step in storage.steps()]
            if not files:
                raise FileNotFoundError("the folder has none")
        rows = []
        for file in files:
            try:
                rows.append(describe(file))
            except FileNotFoundError:
                if file == path:
                    raise
                # Otherwise a run that is training has deleted it since the folder was listed.
    except OSError as error:
        raise UserError(f"PATH: no snapshot at {path}: {error}; main.py makes them in its run folder") from error
    evaluated = [row for row in rows if row[3] and row[0].isdigit()]  # none of the frequent ones
    if evaluated:
        best = min(evaluated, key=lambda row: float(row[3]))
        best[3] += " best"
    return rows


def run(argv: Sequence[str]) -> None:
    """Prints the table; exits with status 1 if a snapshot is damaged.

    Raises:
        UserError: there is no snapshot, or it can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mingpt.snapshot",
        description="Lists snapshots with fingerprints of weights and optimizer state, which are equal for equal bits.",
    )
    parser.add_argument("path", metavar="PATH", help="run folder, folder of snapshots, or one file; may be a URL")
    path = parser.parse_args(argv).path
    rows = [COLUMNS, *describe_all(path.rstrip("/") or path)]
    widths = [max(len(row[i]) for row in rows if i < len(row) and len(row[i]) < 40) for i in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    if any(row[4] != "whole" for row in rows[1:]):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
