"""How is a snapshot written without holding the step? Copied aside, and written from the copy by a thread."""

from __future__ import annotations

import queue
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapshot import SnapshotFolder


class Written(NamedTuple):
    """What came of a snapshot.

    Args:
        step: its step
        val_loss: its validation loss
        error: why it is not there, or None
        best: step and val_loss of the best snapshot, with this one
    """

    step: int
    val_loss: float | None
    error: Exception | None
    best: dict[str, Any]


class Writer:
    """Writes snapshots in the background, one at a time.

    Args:
        folder: where to
    """

    def __init__(self, folder: SnapshotFolder) -> None:
        self.folder = folder
        self.aside: dict[tuple[str, ...], Tensor] = {}
        self.thread = threading.Thread()
        self.written: queue.SimpleQueue[Written] = queue.SimpleQueue()

    def save(self, snapshot: dict[str, Any]) -> None:
        """Copies the snapshot's tensors and returns; later changes to them don't reach what is written.

        Args:
            snapshot: what to save, when none is being written
        """
        copy = self._copy(snapshot)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.thread = threading.Thread(target=self._write, args=(copy,), daemon=True)
        self.thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the snapshot that is being written, so long at most; returns whether it is done."""
        if self.thread.ident is not None:
            self.thread.join(seconds)
        return not self.thread.is_alive()

    def news(self) -> list[Written]:
        """What has come of snapshots since it was last asked for."""
        return [self.written.get() for _ in range(self.written.qsize())]

    def _copy(self, value: Any, place: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(inner, (*place, str(key))) for key, inner in value.items()}
        if not isinstance(value, Tensor):
            return value
        aside = self.aside.get(place)
        if aside is None or aside.shape != value.shape:
            aside = self.aside[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return aside.copy_(value, non_blocking=True)

    def _write(self, snapshot: dict[str, Any]) -> None:
        error: Exception | None = None
        try:
            self.folder.write(snapshot, snapshot["best"]["step"])
        except Exception as raised:  # for the loop to tell
            error = raised
        self.written.put(Written(snapshot["step"], snapshot["val_loss"], error, snapshot["best"]))
