"""Lists snapshots with fingerprints for comparing runs: python -m mingpt.snapshot PATH."""

import argparse
import sys
from collections.abc import Sequence

from mingpt.errors import UserError
from mingpt.program import run_program
from mingpt.snapshot.folder import DamagedSnapshotError, SnapshotFolder, fingerprint, load_snapshot

ROW = "{:<14}  {:<8}  {:<5}  {:<16}  {}"


def find_files(path: str) -> list[str]:
    """Returns the snapshots in a run folder or a folder of snapshots, or the path itself if it is a file.

    Raises:
        UserError: there are no snapshots, or they can't be read.
    """
    folders = (SnapshotFolder(path), SnapshotFolder(f"{path}/snapshots"))
    if folders[0].fs.isfile(folders[0].root):
        return [path]
    files = [folder.file(step) for folder in folders for step in folder.files()]
    if not files:
        raise UserError(f"PATH: no snapshot at {path}; main.py saves them in its run folder")
    return files


def run(argv: Sequence[str]) -> int:
    """Prints the table. Returns the exit status, which is 1 if a snapshot is damaged.

    Raises:
        UserError: there are no snapshots, or they can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mingpt.snapshot",
        description="Lists snapshots with fingerprints of weights and optimizer state, which are equal for equal bits.",
    )
    parser.add_argument("path", metavar="PATH", help="run folder, folder of snapshots, or one file; may be a URL")
    path = parser.parse_args(argv).path
    status = 0
    print(ROW.format("step", "val_loss", "state", "weights", "optimizer"))
    for file in find_files(path.rstrip("/")):
        try:
            snapshot = load_snapshot(file)
        except FileNotFoundError:  # a run that is training has deleted it
            continue
        except (DamagedSnapshotError, OSError, UserError) as error:
            print(f"{file}  DAMAGED: {error}")
            status = 1
            continue
        val_loss = "" if snapshot["val_loss"] is None else f"{snapshot['val_loss']:.4f}"
        digests = fingerprint(snapshot["model"]), fingerprint(snapshot["optimizer"])
        print(ROW.format(snapshot["step"], val_loss, "whole", *digests))
    return status


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
