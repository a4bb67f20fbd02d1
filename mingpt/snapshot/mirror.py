"""Uploads snapshots to the URL of trainer.snapshot_path."""

import os

from mingpt.snapshot.folder import SnapshotFolder, raise_user_error


def sync(local: SnapshotFolder, remote: SnapshotFolder) -> None:
    """Uploads the newest scheduled snapshot and the best one, then deletes expired remote snapshots.

    It compares names and sizes, so it does nothing if the mirror is complete. The store's own client repeats failed
    requests. Object stores show a file when it is complete; other stores may show a part of one.

    Raises:
        UserError: a file can't be written, or the remote folder can't be read.
    """
    remote.scheduled = local.scheduled
    remote.best = local.best
    names = local.files()
    present = remote.files()
    for step in names.keys() & {*remote.scheduled[-1:], remote.best}:
        path = os.path.join(local.root, names[step])
        copy = f"{remote.root}/{names[step]}"
        problem = f"trainer.snapshot_path: {remote.path}/{names[step]} can't be written"
        with raise_user_error(problem, "make it writable, or set another URL"):
            try:
                is_whole = step in present and remote.fs.size(copy) == os.path.getsize(path)
                if not is_whole or step in remote.damaged:
                    remote.fs.put_file(path, copy)
                    remote.damaged.discard(step)
            except FileNotFoundError:
                if os.path.exists(path):
                    raise
                # It has expired during an earlier upload. The save of its successor starts another one.
    remote.prune(max(names, default=-1))
