"""Uploads snapshots to the URL of trainer.snapshot_path."""

import os
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from mingpt.errors import UserError
from mingpt.snapshot.folder import SnapshotFolder, raise_user_error

OWNER = "run_id"  # object beside the snapshots, with the id of their run
OTHER_RUN = "trainer.snapshot_path: set another URL, since {} has the snapshots of another run"


def sync(local: SnapshotFolder, remote: SnapshotFolder, run_id: str) -> None:
    """Uploads the newest scheduled snapshot and the best one, then deletes expired remote snapshots.

    It compares names and sizes, so it does nothing if the mirror is complete. Damaged files are not uploaded. The
    store's own client repeats failed requests. Object stores show a file when it is complete; other stores may show a
    part of one.

    Raises:
        UserError: a file can't be written, the remote folder can't be read, or it has the snapshots of another run.
    """
    remote.scheduled = local.scheduled
    remote.best = local.best
    names = local.files()
    present = remote.files()
    owner = read_owner(remote) if present else None
    if owner is None:
        with raise_user_error(f"trainer.snapshot_path: {remote.path}/{OWNER} can't be written", "make it writable"):
            remote.fs.pipe_file(f"{remote.root}/{OWNER}", run_id.encode())
    elif owner != run_id:
        raise UserError(OTHER_RUN.format(remote.path))
    for step in names.keys() & {*remote.scheduled[-1:], remote.best}:
        path = os.path.join(local.root, names[step])
        copy = f"{remote.root}/{names[step]}"
        problem = f"trainer.snapshot_path: {remote.path}/{names[step]} can't be written"
        with raise_user_error(problem, "make it writable, or set another URL"):
            try:
                is_complete = step in present and remote.fs.size(copy) == os.path.getsize(path)
                if (not is_complete or step in remote.damaged) and local.is_whole(step):
                    remote.fs.put_file(path, copy)
                    remote.damaged.discard(step)
            except FileNotFoundError:
                if os.path.exists(path):
                    raise
                # It has expired during an earlier upload. The save of its successor starts another one.
    remote.prune(max(names, default=-1))


def read_owner(remote: SnapshotFolder) -> str | None:
    """Returns the id of the run whose snapshots are in a mirror. None: an earlier version has written them."""
    with raise_user_error(f"{remote.path}/{OWNER} can't be read", "make it readable"), suppress(FileNotFoundError):
        return remote.fs.cat_file(f"{remote.root}/{OWNER}").decode()
    return None


def check_owner(remote: SnapshotFolder, local: dict[str, Any], newest: dict[str, Any], run_dir: str) -> None:
    """Raises a UserError if a mirror has the snapshots of another run than the one that starts.

    Args:
        local: the newest local snapshot; empty: the run is new, or its machine was lost
        newest: the newest snapshot, maybe of the mirror
        run_dir: this run's trainer.run_dir, whose name is the run's name
    """
    theirs = PurePath(newest["config"]["trainer"]["run_dir"]) if newest else PurePath(run_dir)
    if local and read_owner(remote) not in (None, local["run_id"]):
        raise UserError(OTHER_RUN.format(remote.path))
    if not local and theirs.name != PurePath(run_dir).name:
        raise UserError(
            f"{OTHER_RUN.format(remote.path)}, {theirs}; to continue that one here, set trainer.run_dir to a folder of "
            "this name"
        )
