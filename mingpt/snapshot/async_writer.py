"""How is a snapshot written without holding the step? Copied aside, and written from the copy by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from mingpt.snapshot.storage import SnapshotStorage
from mingpt.utils.errors import UserError


class SaveResult(NamedTuple):
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


class AsyncSnapshotWriter:
    """Writes snapshots in the background, one at a time.

    Args:
        folder: where to
    """

    def __init__(self, folder: SnapshotStorage) -> None:
        self.folder = folder
        self.staging_buffers: dict[str, Tensor] = {}
        self.idle = threading.Event()
        self.idle.set()
        self.ready: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.written: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        # It waits for work: to start a thread would hold the step until that thread gets the interpreter's lock.
        threading.Thread(target=self._write, daemon=True).start()

    @torch.no_grad()
    def save(self, header: dict[str, Any], state: Iterable[tuple[str, Tensor, dict[str, Tensor]]]) -> None:
        """Copies the tensors and returns, when no snapshot is being written; later changes don't reach what is written.

        Args:
            header: all of the snapshot but `model` and `optimizer`
            state: name, weight and optimizer state of each parameter
        """
        snapshot = header | {"model": {}, "optimizer": {}}
        for name, weight, moments in state:
            tensors = {"": weight, **moments}
            copies = {key: self._buffer(f"{name}/{key}", tensor) for key, tensor in tensors.items()}
            torch._foreach_copy_(list(copies.values()), list(tensors.values()), non_blocking=True)
            snapshot["model"][name] = copies.pop("")
            snapshot["optimizer"][name] = copies
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.idle.clear()
        self.ready.put(snapshot)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the snapshot that is being written, so long at most; returns whether it is done."""
        return self.idle.wait(seconds)

    def poll(self) -> list[SaveResult]:
        """What has come of snapshots since it was last asked for."""
        return [self.written.get() for _ in range(self.written.qsize())]

    def _buffer(self, place: str, tensor: Tensor) -> Tensor:
        if place not in self.staging_buffers:
            self.staging_buffers[place] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return self.staging_buffers[place]

    def _write(self) -> None:
        while True:
            snapshot, error = self.ready.get(), None
            try:
                if not get_total_norm(list(snapshot["model"].values())).isfinite():
                    raise UserError("the step's update made weights that are not finite; lower optimizer.learning_rate")
                self.folder.write(snapshot, snapshot["best"]["step"])
            except Exception as raised:  # for the loop to tell
                error = raised
            self.written.put(SaveResult(snapshot["step"], snapshot["val_loss"], error, snapshot["best"]))
            self.idle.set()
