"""Refuses runs whose state can't fit into the memory, and measures the state in the first step."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from mingpt.config.schema import Config
from mingpt.distributed.agreement import reduce_object
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.optim.muon import to_local
from mingpt.parallel.strategy import Strategy
from mingpt.system.device import memory_per_rank


def format_bytes(number: float) -> str:
    """Returns a number of bytes in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def check_memory(config: Config, num_trained: int, context: DistributedContext) -> None:
    """Checks that parameters, gradients and optimizer state fit into the memory of a rank.

    Copies that exist only during a part of the step are not included.

    Args:
        num_trained: parameters of the whole model that are not frozen

    Raises:
        UserError: they do not fit.
    """
    cfg = config.distributed
    replicas = context.world_size // cfg.pipeline_stages
    state = 8 if config.optimizer.name == "adamw" else 4  # bytes per parameter
    bytes_per_parameter = {
        "ddp": 8 + state,
        "zero1": 8 + state / replicas,
        "zero2": (8 + state) / replicas,
        "fsdp": (8 + state) / replicas,
    }
    needed = num_trained / cfg.pipeline_stages * bytes_per_parameter[cfg.strategy]
    device = torch.device("cpu") if cfg.cpu_offload else context.device
    available = memory_per_rank(device, context.local_world_size, context.world_size)
    if needed > available:
        where = " free on the GPU" if device.type == "cuda" else ""
        raise UserError(
            f"out of memory before the first step: a rank needs {format_bytes(needed)} for parameters, gradients and "
            f"optimizer state, but has only {format_bytes(available)}{where}; use a smaller model, or more GPUs with "
            "distributed.strategy fsdp"
        )


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
