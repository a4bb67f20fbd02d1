"""Writes snapshots in the background."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from mingpt.errors import UserError
from mingpt.snapshot.folder import SnapshotFolder
from mingpt.snapshot.format import split_header
from mingpt.snapshot.mirror import Mirror
from mingpt.snapshot.worker import SaveResult, Worker
from mingpt.system.run_lock import RunLock


class SnapshotWriter(Worker):
    """A thread that writes snapshots to a local folder.

    Attributes:
        costs: seconds that each of the newest saves has taken from training

    Args:
        lock: lock of the folder. If it is lost, nothing is written or deleted.
        mirror: uploads what was written
    """

    def __init__(self, folder: SnapshotFolder, lock: RunLock, mirror: Mirror | None) -> None:
        super().__init__()
        self.folder = folder
        self.lock = lock
        self.mirror = mirror
        self.staging_buffers: dict[str, Tensor] = {}
        self.costs: deque[float] = deque(maxlen=16)
        self.copy_seconds = 0.0  # of the current save

    @torch.no_grad()
    def save(
        self, header: dict[str, Any], state: Iterable[tuple[str, Tensor, dict[str, Tensor]]], device: torch.device
    ) -> None:
        """Copies the state to staging buffers and returns. The previous save must be done.

        Args:
            header: the snapshot without the state
            state: name, weight and optimizer state of each parameter
            device: device of the model
        """
        _synchronize(device)  # otherwise, the time of the copy would include the step before it
        began = time.perf_counter()
        snapshot = header | {"model": {}, "optimizer": {}}
        for name, weight, moments in state:
            tensors = {"": weight, **moments}
            copies = {key: self._buffer(f"{name}/{key}", tensor) for key, tensor in tensors.items()}
            # On other devices, non_blocking is unsafe without pinned memory
            # (https://github.com/pytorch/pytorch/issues/189690).
            torch._foreach_copy_(list(copies.values()), list(tensors.values()), non_blocking=weight.is_cuda)
            snapshot["model"][name] = copies.pop("")
            snapshot["optimizer"][name] = copies
        _synchronize(device)
        self.copy_seconds = time.perf_counter() - began
        self.submit(snapshot)

    def close(self) -> None:
        super().close()
        self.staging_buffers.clear()

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.staging_buffers:
            self.staging_buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return self.staging_buffers[name]

    def handle(self, snapshot: dict[str, Any]) -> None:
        began = time.thread_time()
        header = split_header(snapshot)
        error = None
        try:
            # Buffers and frozen parameters have no optimizer state. A buffer may be a mask of infinities, or integers.
            trained = [weight for name, weight in snapshot["model"].items() if snapshot["optimizer"].get(name)]
            if not get_total_norm(trained).isfinite():
                raise UserError("the step's update produced non-finite weights; lower optimizer.learning_rate")
            self.lock.check()
            self.folder.write(snapshot)
            if self.mirror is not None and header["step"] in (*header["scheduled"], header["best"]["step"]):
                self.mirror.upload(header)
        except Exception as raised:  # reported by the training loop
            error = raised
        self.results.append(SaveResult(header, error))
        # While the file is written, steps take longer, at most by the CPU time of this thread.
        self.costs.append(self.copy_seconds + time.thread_time() - began)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # on the CPU, this would initialize a GPU that is not used
        torch.accelerator.synchronize(device)
