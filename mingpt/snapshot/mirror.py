"""Uploads snapshots to the URL of trainer.snapshot_path."""

import os

from mingpt.snapshot.folder import SnapshotFolder, raise_user_error


def sync(local: SnapshotFolder, remote: SnapshotFolder, step: int) -> None:
    """Uploads the newest scheduled snapshot and the best one, then deletes those that the remote folder need not keep.

    It compares names and sizes, so it does nothing if the mirror is complete. The store's own client repeats failed
    requests. Object stores show a file when it is complete; other stores may show a part of one.

    Args:
        step: step of the newest snapshot; later ones are not deleted

    Raises:
        UserError: a file can't be written, or the remote folder can't be read.
    """
    remote.scheduled = local.scheduled
    remote.best = local.best
    names = local.files()
    present = remote.files()
    for kept in names.keys() & {*local.scheduled[-1:], local.best}:
        path = os.path.join(local.root, names[kept])
        copy = f"{remote.root}/{names[kept]}"
        problem = f"trainer.snapshot_path: {remote.path}/{names[kept]} can't be written"
        with raise_user_error(problem, "make it writable, or set another URL"):
            is_whole = kept in present and remote.fs.size(copy) == os.path.getsize(path)
            if not is_whole or kept in remote.damaged:
                remote.fs.put_file(path, copy)
        remote.damaged.discard(kept)
    remote.prune(step)
