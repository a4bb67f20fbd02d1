"""Memory per rank: what a configuration needs, estimated before training, and what a strategy holds, measured.

Each strategy estimates its own; shared parts are here. All in fp32, for `a` parameters on `n` ranks with AdamW (Muon's
state of the blocks' matrices is half as large), in bytes:

        parameters       gradients    optimizer state      peak, besides activations
ddp     4a               4a           8a                   no more: gradients are views of the buckets
zero1   4a               4a           8a/n (of whole       the same
                                      parameters: the largest rank has more)
zero2   4a/n             4a/n         8a/n                 4a: all parameters unsharded
fsdp    4a/n             4a/n         8a/n                 two unsharded blocks and the embeddings

zero2 and fsdp hold full gradients, 4a, while micro-batches accumulate, and otherwise those of one block at a time.
Unsharded blocks take 2 bytes per parameter in bf16 and fp16; ddp and zero1 then keep autocast's copies of matrices,
2 bytes each, from forward to backward. ZeRO-2 as in the paper never shards parameters, 4a + 12a/n; this one is FSDP's,
which shards them between steps: 16a/n then, and 4a + 16a/n at the peak.

A pipeline stage is a model of its own on the n ranks of its replicas. It keeps the activations of all micro-batches in
flight and has a receive buffer for each, and fsdp holds all its blocks unsharded from the first backward pass on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mingpt.config import GPTConfig, OptimizerConfig
from mingpt.loss import cross_entropy
from mingpt.optimizer import param_groups
from mingpt.parallel.parallelize import apply_activation_checkpointing, split_into_stages
from mingpt.utils.tensors import to_local


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that a rank holds on its device: its shards, or all."""

    parameters: float
    gradients: float
    optimizer: float  # state
    unsharded: float = 0  # parameters, gradients and copies that exist for a part of the step
    activations: float = 0  # what forward keeps for backward

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.unsharded + self.activations

    def __str__(self) -> str:
        text = (
            f"{format_bytes(self.total)} per rank = parameters {format_bytes(self.parameters)} + "
            f"gradients {format_bytes(self.gradients)} + optimizer state {format_bytes(self.optimizer)}"
        )
        text += f" + {format_bytes(self.unsharded)} unsharded for a part of the step" * bool(self.unsharded)
        return text + f" + activations {format_bytes(self.activations)}" * bool(self.activations)


def format_bytes(number: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def measure_memory(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> MemoryUsage:
    """What this rank holds between backward and the end of the step."""
    parameters = list(parameters)
    state = [tensor for tensors in optimizer.state.values() for tensor in tensors.values()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return MemoryUsage(*(sum(to_local(t).nbytes for t in tensors) for tensors in (parameters, gradients, state)))


def optimizer_bytes(model: nn.Module, config: OptimizerConfig, ranks: int = 1) -> int:
    """Bytes of optimizer state on the rank that has most: Muon keeps one average per parameter, AdamW two.

    Parameters are assigned to ranks like in ZeroRedundancyOptimizer: per group, the largest first, each to the rank
    with the fewest elements.
    """
    elements, needed = [0] * ranks, [0] * ranks
    for group in param_groups(model, config):
        for parameter in sorted(group["params"], key=lambda p: -p.numel()):
            rank = elements.index(min(elements))
            elements[rank] += parameter.numel()
            needed[rank] += parameter.numel() * (4 if group["muon"] else 8)
    return max(needed)


@lru_cache
def activation_bytes(
    model_class: type[nn.Module],
    model_config: GPTConfig,
    stage: int,
    stages: int,
    precision: str,
    mode: str,
    device: str,
) -> float:
    """Bytes per sequence that forward keeps for backward, and those that backward recomputes for one block.

    Measured on models of one and two blocks per stage, without data, and extrapolated.

    Args:
        model_class, model_config: of the whole model
        stage, stages: index of the pipeline stage, and the number of stages
        mode: activation checkpointing: none, selective or full
    """
    layers = model_config.n_layer * (stage + 1) // stages - model_config.n_layer * stage // stages
    few = min(stages, 3)
    place = (stage > 0) + (stage == stages - 1) if few == 3 else stage  # first, middle or last

    def of_blocks(mode: str) -> tuple[float, float]:
        small = (replace(model_config, n_layer=count * few) for count in (1, 2))
        one, two = (_kept_bytes(model_class, config, place, few, precision, mode, device) for config in small)
        return one, two - one

    first, block = of_blocks(mode)
    recomputed = of_blocks("none")[1] if mode != "none" else 0.0
    if mode == "selective":
        # Outputs of products: query, key, value, attention, its projection, the two of the MLP.
        block += 10 * model_config.n_embd * model_config.block_size * (4 if precision == "fp32" else 2)
    return first + (layers - 1) * block + recomputed


def _kept_bytes(
    model_class: type[nn.Module], config: GPTConfig, stage: int, stages: int, precision: str, mode: str, device: str
) -> int:
    """Bytes that a third sequence adds to what forward keeps for backward, counted on tensors without data.

    A second one may add others: where the first dimension is 1, some copies are views.
    """
    counts = []
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    for B in (2, 3):
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor, storages: dict = storages) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            return tensor

        with FakeTensorMode(), torch.device(device):
            model: Any = split_into_stages(model_class(config), stages)[stage]
            apply_activation_checkpointing(model, mode)
            idx = torch.zeros(B, config.block_size, dtype=torch.long)
            x = torch.zeros(*idx.shape, config.n_embd, requires_grad=True) if stage else idx
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with hooks, torch.autocast(device, dtype, enabled=precision != "fp32"):
                out = model(x)
                if stage == stages - 1:
                    cross_entropy(out, idx)
        counts.append(sum(storage.nbytes() for storage in storages.values()))
    return counts[1] - counts[0]
