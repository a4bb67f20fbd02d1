"""Measures the memory of parameters, gradients and optimizer state in the first step."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from mingpt.distributed.agreement import reduce_object
from mingpt.optim.muon import to_local
from mingpt.parallel.strategy import Strategy


def format_bytes(number: float) -> str:
    """Returns a number of bytes in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def measure_memory(strategy: Strategy) -> dict[str, int]:
    """Returns the bytes, by kind, that the rank with the highest usage holds between backward and the end of the step.

    All ranks must call it.
    """
    usage = {
        "parameters": _local_bytes(strategy.parameters),
        "gradients": _local_bytes(strategy.gradients),
        "optimizer state": sum(map(_local_bytes, strategy.local_state.values())),
    }
    return reduce_object(strategy.context, usage, partial(max, key=lambda each: sum(each.values())))


def _local_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(to_local(tensor).nbytes for tensor in tensors.values())
