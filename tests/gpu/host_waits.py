"""Finds operations on FakeTensors for which the host would wait for a GPU, and copies that would race with it."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu import pretended_gpu

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
aten: Any = torch.ops.aten
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class HostWaits(TorchDispatchMode):
    """Records what the host waits for, and which copies are neither safe nor asynchronous.

    To be entered after FakeTensorMode. Reading a value that does not exist, as `item` does, returns 0.

    Attributes:
        recording: whether to record; pinned memory is tracked all the time
        found: descriptions, each with the lines of the project that led there, and how often
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.found: Counter[str] = Counter()
        # By address; the storage is kept, so that no other gets its address.
        self.pinned: dict[int, torch.UntypedStorage] = {}
        self.in_flight: dict[int, torch.UntypedStorage] = {}  # on the host, while the device writes to it

    def __enter__(self) -> "HostWaits":
        pretended_gpu.on_synchronize.append(self._synchronize)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        pretended_gpu.on_synchronize.remove(self._synchronize)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # its operations on local tensors come here
        kwargs, op = dict(kwargs or {}), func.overloadpacket
        if op is aten.is_pinned:
            return self._is_pinned(args[0])
        if op in (aten.pin_memory, aten._pin_memory):  # a copy with the same strides
            return self._pin(torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype))
        pin_memory = kwargs.pop("pin_memory", False)
        self._check_reads(func, args, kwargs)
        if op in (aten._local_scalar_dense, aten.equal):
            return self._read(func, args)
        if op is aten.multinomial and args[0].is_cuda:
            self._report(f"{op} waits for the device, to check probabilities")
        if op in INDEXING and args[0].is_cuda:
            self._check_indices(args[1])
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException:  # the run can't continue
            self.recording = True
            self._report(f"{op} waits for the device, for the size of its result")
            raise
        if op is aten._to_copy:
            self._check_copy(args[0], result, kwargs.get("non_blocking", False), is_new=True)
        elif op in (aten.copy_, aten._foreach_copy_):
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            for target, source in zip(tree_leaves(args[0]), tree_leaves(args[1]), strict=True):
                self._check_copy(source, target, non_blocking, is_new=False)
        return self._pin(result) if pin_memory else result

    def _check_copy(self, source: Tensor, target: Tensor, non_blocking: bool, is_new: bool) -> None:
        devices = source.device.type, target.device.type
        if devices == ("cpu", "cuda"):
            if not self._is_pinned(source):
                self._report("copy to the device from memory that is not pinned")
            elif not source.is_contiguous():
                self._report("copy to the device of a tensor that is not contiguous")
            elif not non_blocking:
                self._report("copy to the device that is not non_blocking")
        elif devices == ("cuda", "cpu"):
            if not non_blocking:
                self._report("copy to the host that is not non_blocking")
            elif is_new or self._is_pinned(target):
                self._pin(target)  # where PyTorch allocates the result
                storage = target.untyped_storage()
                self.in_flight[storage._cdata] = storage
            else:
                self._report("copy to the host into memory that is not pinned")

    def _check_indices(self, indices: Any) -> None:
        if not all(index is None or index.is_cuda for index in indices):
            self._report("copy to the device from memory that is not pinned")

    def _check_reads(self, func: Any, args: Any, kwargs: Any) -> None:
        if not self.in_flight or func.is_view or func.namespace == "prim":
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.untyped_storage()._cdata in self.in_flight for tensor in tensors):
            self._report(f"{func.overloadpacket} reads a copy from the device without a synchronization")

    def _read(self, func: Any, tensors: tuple[Tensor, ...]) -> Any:
        if any(tensor.is_cuda for tensor in tensors):
            self._report(f"{'torch.equal' if len(tensors) == 2 else 'item'}() waits for the device")
        try:
            return func(*tensors)
        except DataDependentOutputException:
            return 0

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = storage
        return tensor

    def _synchronize(self, name: str) -> None:
        self._report(f"{name}() waits for the device")
        self.in_flight.clear()

    def _report(self, what: str) -> None:
        if self.recording:
            self.found[f"{what}: {_call_chain()}"] += 1


def _call_chain() -> str:
    """The innermost lines of the project on the stack, and the function of PyTorch that the first of them called."""
    lines: list[str] = []
    called = ""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        is_installed = "site-packages" in file.parts  # in a virtual environment that is in the repository
        if file.is_relative_to(ROOT) and not file.is_relative_to(FOLDER) and not is_installed:
            lines.append(f"{file.relative_to(ROOT)}:{frame.lineno}")
        elif not lines and not file.is_relative_to(FOLDER):
            called = f", in {frame.name}"
    return " < ".join(lines[:3]) + called if lines else "in a thread of autograd"
