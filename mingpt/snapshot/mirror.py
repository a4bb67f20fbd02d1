"""Uploads snapshots to the URL of trainer.snapshot_path."""

import os
from typing import Any

from mingpt.snapshot.folder import SnapshotFolder, raise_user_error
from mingpt.snapshot.worker import SaveResult, Worker


class Mirror(Worker):
    """A thread that copies the newest scheduled snapshot and the best one of a local folder to a URL.

    It delays neither training nor local saves, and skips a snapshot if a newer one is waiting. The store's own
    client repeats failed requests. Object stores show a file when it is complete; in other stores, the CRC-32 detects
    one whose upload has not ended.

    Args:
        remote: folder at the URL
    """

    def __init__(self, local: SnapshotFolder, remote: SnapshotFolder) -> None:
        super().__init__()
        self.local = local
        self.remote = remote
        self.requested = -1  # step of the newest request

    def upload(self, header: dict[str, Any]) -> None:
        """Starts to upload the snapshots that a header names."""
        self.requested = header["step"]
        self.submit(header)

    def handle(self, header: dict[str, Any]) -> None:
        if header["step"] < self.requested:
            return
        try:
            self._upload(header)
        except Exception as error:  # reported by the training loop
            self.results.append(SaveResult(header, error))

    def _upload(self, header: dict[str, Any]) -> None:
        remote = self.remote
        remote.scheduled = header["scheduled"]
        for step in (*header["scheduled"][-1:], header["best"]["step"]):
            name = self.local.files().get(step)
            if name is None or step in remote.files().keys() - remote.damaged:
                continue
            problem = f"trainer.snapshot_path: {remote.path}/{name} can't be written"
            with raise_user_error(problem, "make it writable, or set another URL"):
                remote.fs.put_file(os.path.join(self.local.root, name), f"{remote.root}/{name}")
            remote.damaged.discard(step)
        remote.prune(header)
