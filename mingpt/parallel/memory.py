"""Memory per rank without activations: estimated before training, and measured in the first step.

Bytes in fp32, for `a` parameters on `n` ranks with AdamW (Muon's state of the blocks' matrices is half as large):

        parameters   gradients   optimizer state          during a part of the step
ddp     4a           4a          8a                       nothing: gradients are views of the buckets
zero1   4a           4a          8a/n (whole              nothing
                                 parameters, so some
                                 ranks hold more)
zero2   4a/n         4a/n        8a/n                     4a: all parameters unsharded
fsdp    4a/n         4a/n        8a/n                     two unsharded blocks and the embeddings

While micro-batches accumulate, zero2 and fsdp hold full gradients, 4a; otherwise they hold the gradients of one block.
In bf16 and fp16, unsharded blocks take 2 bytes per parameter, and with ddp and zero1, autocast's copies of matrices
take 2 bytes each from forward to backward. ZeRO-2 in the paper does not shard parameters and takes 4a + 12a/n; here it
is FSDP, which shards them between steps and takes 16a/n then, and 4a + 16a/n at the peak.

A pipeline stage is a separate model on the n ranks that hold it. The estimate includes all embeddings. From the first
backward pass on, fsdp holds all blocks of a stage unsharded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.optim.muon import to_local
from mingpt.optim.optimizer import state_bytes
from mingpt.parallel.strategy import Strategy
from mingpt.system.device import memory_per_rank
from model import GPT


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that a rank holds on its device.

    Attributes:
        optimizer: optimizer state
        unsharded: parameters, gradients and copies that exist during a part of the step
    """

    parameters: float
    gradients: float
    optimizer: float
    unsharded: float = 0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.unsharded

    def __str__(self) -> str:
        text = (
            f"{format_bytes(self.total)} per rank without activations: parameters {format_bytes(self.parameters)}, "
            f"gradients {format_bytes(self.gradients)}, optimizer state {format_bytes(self.optimizer)}"
        )
        if self.unsharded:
            text += f", during a part of the step {format_bytes(self.unsharded)}"
        return text


def format_bytes(number: float) -> str:
    """Returns a number of bytes in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def measure_memory(strategy: Strategy) -> MemoryUsage:
    """Returns the bytes that this rank holds between backward and the end of the step."""
    state = sum(map(_local_bytes, strategy.local_state.values()))
    return MemoryUsage(_local_bytes(strategy.parameters), _local_bytes(strategy.gradients), state)


def _local_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(to_local(tensor).nbytes for tensor in tensors.values())


def count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def estimate_memory(config: Config, model: GPT, world_size: int, precision: str) -> MemoryUsage:
    """Returns the bytes of the rank that needs most.

    Args:
        model: a GPT on the meta device
        precision: fp32, bf16 or fp16
    """
    cfg = config.distributed
    ranks = world_size // cfg.pipeline_stages
    block = count(model.blocks[0].parameters())
    total = count(model.parameters())
    embeddings = total - len(model.blocks) * block
    layers = -(-len(model.blocks) // cfg.pipeline_stages)
    parameters = layers * block + embeddings
    state = state_bytes(model, config.optimizer) * parameters / total
    share = -(-config.trainer.batch_size // ranks)  # sequences of the rank with most in a step
    micro_batch_size = config.trainer.micro_batch_size or share
    if cfg.uses_fsdp:
        whole_layers = layers
        if cfg.strategy == "fsdp" and cfg.pipeline_stages == 1:
            whole_layers = min(2, layers)  # the next block is gathered while one is in use
        unsharded = whole_layers * block * (4 if precision == "fp32" else 2) + 4 * embeddings
        unsharded += 4 * (parameters if micro_batch_size < share else block)  # gradients
        if cfg.cpu_offload:
            return MemoryUsage(0, 0, 0, unsharded)
        return MemoryUsage(4 * parameters / ranks, 4 * parameters / ranks, state / ranks, unsharded)
    unsharded = 0 if precision == "fp32" else 2 * parameters  # autocast's copies
    if cfg.reduction == "tree":
        micro_batches = -(-share // micro_batch_size)
        # The gradient of one micro-batch, and one partial sum per digit of a binary counter.
        unsharded += 4 * parameters * (1 + micro_batches.bit_length())
    if cfg.strategy == "zero1":
        state /= ranks
    return MemoryUsage(4 * parameters, 4 * parameters, state, unsharded)


def check_memory(usage: MemoryUsage, device: torch.device, local_world_size: int, world_size: int) -> None:
    """Raises a UserError if a rank's memory does not suffice, even without activations."""
    available = memory_per_rank(device, local_world_size, world_size)
    if usage.total > available:
        where = " free on the GPU" if device.type == "cuda" else ""
        raise UserError(
            f"out of memory before the first step: it needs {usage}; there are {format_bytes(available)}{where}; use a "
            "smaller model, or more GPUs with distributed.strategy fsdp"
        )
