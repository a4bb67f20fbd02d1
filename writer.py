"""How is a snapshot written without holding the step? Copied aside, and written from the copy by a thread."""

from __future__ import annotations

import queue
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from errors import UserError
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
        self.idle = threading.Event()
        self.idle.set()
        self.ready: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.written: queue.SimpleQueue[Written] = queue.SimpleQueue()
        # It waits for work: to start a thread would hold the step until that thread gets the interpreter's lock.
        threading.Thread(target=self._write, daemon=True).start()

    @torch.no_grad()
    def save(self, snapshot: dict[str, Any]) -> None:
        """Copies the snapshot's tensors and returns; later changes to them don't reach what is written.

        Args:
            snapshot: what to save, when none is being written
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        copy = self._plan(snapshot, (), pairs)
        torch._foreach_copy_([aside for aside, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.idle.clear()
        self.ready.put(copy)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the snapshot that is being written, so long at most; returns whether it is done."""
        return self.idle.wait(seconds)

    def news(self) -> list[Written]:
        """What has come of snapshots since it was last asked for."""
        return [self.written.get() for _ in range(self.written.qsize())]

    def _plan(self, value: Any, place: tuple[str, ...], pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """The value with buffers in place of tensors; `pairs` is told what is to be copied into which."""
        if isinstance(value, dict):
            return {key: self._plan(inner, (*place, key), pairs) for key, inner in value.items()}
        if not isinstance(value, Tensor):
            return value
        aside = self.aside.get(place)
        if aside is None or aside.shape != value.shape:
            aside = self.aside[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        pairs.append((aside, value))
        return aside

    def _write(self) -> None:
        while True:
            snapshot, error = self.ready.get(), None
            try:
                if not get_total_norm(list(snapshot["model"].values())).isfinite():
                    raise UserError("the step's update made weights that are not finite")
                self.folder.write(snapshot, snapshot["best"]["step"])
            except Exception as raised:  # for the loop to tell
                error = raised
            self.written.put(Written(snapshot["step"], snapshot["val_loss"], error, snapshot["best"]))
            self.idle.set()
