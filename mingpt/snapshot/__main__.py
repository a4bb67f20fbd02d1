"""Lists snapshots with fingerprints for comparing runs: python -m mingpt.snapshot PATH."""

import argparse
import os
import sys
from collections.abc import Sequence

from mingpt.errors import UserError
from mingpt.program import run_program
from mingpt.snapshot.folder import DamagedSnapshotError, SnapshotFolder, fingerprint, load_snapshot

COLUMNS = ["step", "val_loss", "state", "weights", "optimizer"]
ROW = "{:<14}  {:<8}  {:<5}  {:<16}  {}"


def find_files(path: str) -> list[str]:
    """Returns the snapshots in a run folder or a folder of snapshots, or the path itself if it is a file.

    Raises:
        UserError: there are no snapshots, or they can't be read.
    """
    folder = SnapshotFolder(path)
    if folder.fs.isfile(folder.root):
        return [path]
    folders = (folder, SnapshotFolder(f"{path}/snapshots"))
    files = [f"{folder.path}/{name}" for folder in folders for name in folder.files().values()]
    if not files:
        raise UserError(f"PATH: no snapshot at {path}; main.py saves them in its run folder")
    return files


def describe(file: str) -> list[str]:
    """Returns the cells of a snapshot's row. Some are empty if it can't be loaded, all if it is gone."""
    name = os.path.basename(file)
    try:
        snapshot = load_snapshot(file)
    except FileNotFoundError:  # a run that is training has deleted it
        return []
    except DamagedSnapshotError as error:
        return [name, "", f"DAMAGED: {error}", "", ""]
    except (OSError, UserError) as error:
        return [name, "", str(error), "", ""]
    val_loss = "" if snapshot["val_loss"] is None else f"{snapshot['val_loss']:.4f}"
    return [
        str(snapshot["step"]),
        val_loss,
        "whole",
        fingerprint(snapshot["model"]),
        fingerprint(snapshot["optimizer"]),
    ]


def run(argv: Sequence[str]) -> None:
    """Prints the table, and exits with status 1 if a snapshot is damaged.

    Raises:
        UserError: there are no snapshots, or they can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mingpt.snapshot",
        description="Lists snapshots with fingerprints of weights and optimizer state, which are equal for equal bits.",
    )
    parser.add_argument("path", metavar="PATH", help="run folder, folder of snapshots, or one file; may be a URL")
    path = parser.parse_args(argv).path
    rows = [row for file in find_files(path.rstrip("/") or path) if (row := describe(file))]
    for row in (COLUMNS, *rows):
        print(ROW.format(*row).rstrip())
    if any(row[2] != "whole" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
