"""Writes snapshots in the background."""

import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from mingpt.errors import UserError
from mingpt.snapshot.format import Best
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.system.run_lock import RunLock


class SaveResult(NamedTuple):
    """The outcome of a save."""

    is_frequent: bool
    step: int
    val_loss: float | None
    error: Exception | None  # why the save has failed
    best: Best  # the best snapshot, including this one
    path: str

    @property
    def row(self) -> dict[str, Any]:
        """The values of its row in the run's log."""
        if self.error is not None:
            return {"error": str(self.error)}
        return {"path": self.path, "val_loss": self.val_loss}


class AsyncSnapshotWriter:
    """Writes snapshots in a thread, one at a time.

    The thread is a daemon, unlike the threads of ThreadPoolExecutor, so that a crash does not wait for a slow store. It
    exists before the first save, because starting it would delay a step until it gets the interpreter's lock.

    Args:
        frequent: storage of the frequent snapshots, maybe in the same folder as the others
        lock: lock of the folders. If one is lost, nothing is written or deleted.
    """

    def __init__(self, frequent: SnapshotStorage, lock: RunLock) -> None:
        self.frequent = frequent
        self.lock = lock
        self.staging_buffers: dict[str, Tensor] = {}
        self.results: deque[SaveResult] = deque()  # results of saves that have ended, until the caller takes them
        self.last_error = ""  # why the newest save other than frequent ones has failed; empty: it succeeded
        self.is_idle = threading.Event()  # set unless a save is in progress
        self.is_idle.set()
        self.queue: queue.SimpleQueue[tuple[dict[str, Any], SnapshotStorage]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    @torch.no_grad()
    def save(
        self,
        header: dict[str, Any],
        state: Iterable[tuple[str, Tensor, dict[str, Tensor]]],
        storage: SnapshotStorage,
    ) -> None:
        """Copies the state to staging buffers and returns. The previous save must be done.

        Args:
            header: the snapshot without the state
            state: name, weight and optimizer state of each parameter, all on one device
        """
        snapshot = header | {"model": {}, "optimizer": {}}
        for name, weight, moments in state:
            tensors = {"": weight, **moments}
            copies = {key: self._buffer(f"{name}/{key}", tensor) for key, tensor in tensors.items()}
            # On other devices, non_blocking is unsafe without pinned memory (https://github.com/pytorch/pytorch/issues/189690).
            torch._foreach_copy_(list(copies.values()), list(tensors.values()), non_blocking=weight.is_cuda)
            snapshot["model"][name] = copies.pop("")
            snapshot["optimizer"][name] = copies
        if weight.device.type != "cpu":
            torch.accelerator.synchronize(weight.device)
        self.is_idle.clear()
        self.queue.put((snapshot, storage))

    def add_result(self, header: dict[str, Any], storage: SnapshotStorage, error: Exception | None) -> None:
        """Adds the result of a save."""
        step = header["step"]
        path = storage.file(step)
        self.results.append(SaveResult(storage.is_frequent, step, header["val_loss"], error, header["best"], path))
        if not storage.is_frequent:
            self.last_error = "" if error is None else str(error)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.staging_buffers:
            self.staging_buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return self.staging_buffers[name]

    def _run(self) -> None:
        while True:
            snapshot, storage = self.queue.get()
            error = None
            try:
                if not get_total_norm(list(snapshot["model"].values())).isfinite():
                    raise UserError("the step's update produced non-finite weights; lower optimizer.learning_rate")
                self._write(snapshot, storage)
            except Exception as raised:  # reported by the training loop
                error = raised
            self.add_result(snapshot, storage, error)
            self.is_idle.set()

    def _write(self, snapshot: dict[str, Any], storage: SnapshotStorage) -> None:
        """Writes a snapshot. If the disk is full, it deletes the frequent ones first, unless there are no others."""
        self.lock.check()
        self.frequent.remove(keep=1)
        try:
            storage.write(snapshot, snapshot["best"]["step"])
        except UserError:
            self.lock.check()  # another run may have its snapshots there now
            if storage.is_frequent or not storage.is_local or not storage.steps():
                raise
            self.frequent.remove()
            storage.write(snapshot, snapshot["best"]["step"])
