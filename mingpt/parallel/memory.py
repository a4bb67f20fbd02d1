"""How much memory does a rank need? Told beforehand, by the strategy's formula, and measured.

For a parameters on n ranks, AdamW and all in fp32, in bytes (of the blocks' matrices, Muon's state is half as much):

        parameters       gradients    optimizer state      at the peak, beside activations
ddp     4a               4a           8a                   nothing more: gradients are views into the buckets
zero1   4a               4a           8a/n (of whole       the same
                                      parameters: the largest rank has more)
zero2   4a/n             4a/n         8a/n                 4a: all parameters whole
fsdp    4a/n             4a/n         8a/n                 two blocks and the embeddings, whole

zero2 and fsdp hold whole gradients, 4a, while micro-batches are accumulated, and else those of a block at a time. Whole
blocks take 2 bytes in place of 4 in bf16 and fp16; ddp and zero1 keep casts of matrices then, 2 bytes each, from
forward to backward. ZeRO-2 as the paper has it never holds parameters in parts, 4a + 12a/n; this one is FSDP's, which
deals them out between steps and so holds 16a/n then, and 4a + 16a/n at its peak.

A pipeline's stage is a model of its own on the n ranks of its replicas. It keeps activations of all micro-batches that
are on their way behind it, and has a place to receive each in; all of fsdp's blocks are whole from the first backward
pass on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mingpt.config import GPTConfig, OptimizerConfig
from mingpt.distributed.process_group import to_local
from mingpt.optimizer import param_groups
from mingpt.parallel.data_parallel import Strategy
from mingpt.parallel.validation import check_shares
from mingpt.utils.errors import UserError
from model import Stage, cross_entropy

if TYPE_CHECKING:
    from mingpt.config import Config


@dataclass(frozen=True)
class MemoryUsage:
    """What a rank holds on its device.

    Args:
        parameters: its part of them
        gradients: its part of them, from backward to the step's end
        optimizer: its part of the optimizer's state
        whole: what more is whole for a while, of parameters and gradients
        activations: what forward keeps for backward
    """

    parameters: float
    gradients: float
    optimizer: float
    whole: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        """At the peak."""
        return self.parameters + self.gradients + self.optimizer + self.whole + self.activations

    def __str__(self) -> str:
        more = f" + {format_bytes(self.whole)} whole for a while" * bool(self.whole)
        more += f" + activations {format_bytes(self.activations)}" * bool(self.activations)
        return (
            f"{format_bytes(self.total)} per rank = parameters {format_bytes(self.parameters)} + "
            f"gradients {format_bytes(self.gradients)} + "
            f"optimizer state {format_bytes(self.optimizer)}{more}"
        )


@lru_cache
def meta_model(shape: GPTConfig, stage: int = 0, stages: int = 1) -> Stage:
    """A model that takes no memory, or one of its stages."""
    with torch.device("meta"):
        return Stage(shape, stage, stages)


def format_memory(need: MemoryUsage, config: Config, shape: GPTConfig, ranks: int) -> str:
    """What the banner says of memory: what a rank needs, how the paper counts it, and what a snapshot takes."""
    model = meta_model(shape)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    moments = _moments(model, config.optimizer, 1)
    parts = (2 * weights + moments) / ranks
    words = {
        "zero1": f"; whole parameters are dealt out: of optimizer state, {format_bytes(moments / ranks)} on average over ranks",
        "zero2": f"; {format_bytes(parts)} between steps, and {format_bytes(weights + parts)} at the peak without activations and "
        f"gradients on the way, where ZeRO-2 has {format_bytes(weights + parts - weights / ranks)} all the time: FSDP deals "
        "out parameters too",
    }
    strategy = config.distributed.strategy
    more = words.get(strategy, "") if config.distributed.pipeline_stages == 1 else ""
    return (
        f"{strategy}: {need}{more}; a snapshot's {format_bytes(weights + moments)} are copied whole into "
        "the memory of the machine that writes it"
    )


def measure_memory(strategy: Strategy) -> MemoryUsage:
    """What this rank does hold, between backward and the step's end."""
    parameters = strategy.parameters.values()
    state = [tensor for tensors in strategy.stepper.state.values() for tensor in tensors.values()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return MemoryUsage(*(sum(to_local(t).nbytes for t in tensors) for tensors in (parameters, gradients, state)))


def format_bytes(number: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def estimate_memory(config: Config, shape: GPTConfig, ranks: int, precision: str, device: str) -> MemoryUsage:
    """What the rank that holds most will hold.

    Args:
        config: all sections
        shape: of the model
        ranks: how many
        precision: fp32, bf16 or fp16
        device: its type
    """
    stages = config.distributed.pipeline_stages
    each = [_of_stage(config, shape, stage, ranks // stages, precision, device) for stage in range(stages)]
    return max(each, key=lambda need: need.total)


def _of_stage(config: Config, shape: GPTConfig, stage: int, ranks: int, precision: str, device: str) -> MemoryUsage:
    """What a rank with this stage will hold, one of so many."""
    knobs, strategy, stages = config.trainer, config.distributed.strategy, config.distributed.pipeline_stages
    model = meta_model(shape, stage, stages)
    a, block = (sum(parameter.numel() for parameter in part.parameters()) for part in (model, model.blocks[0]))
    moments = _moments(model, config.optimizer, ranks if strategy == "zero1" else 1)
    share = -(-knobs.batch_size // ranks)
    portion = min(share, knobs.micro_batch_size or share)
    activations = portion * _activations(shape, stage, stages, precision, knobs.activation_checkpointing, device)
    if stages > 1:
        number = share // portion
        on_their_way = number if config.distributed.pipeline_schedule == "gpipe" else min(number, stages - stage)
        neighbours = (stage > 0) + (stage < stages - 1)
        activations *= on_their_way
        activations += neighbours * share * 4 * shape.block_size * shape.n_embd
    if strategy in ("ddp", "zero1"):
        whole = 0 if precision == "fp32" else 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1)
        if config.distributed.reduction == "tree":  # a micro-batch's gradient, and sums like a binary counter's digits
            whole += 4 * a * (1 + -(-share // portion).bit_length())
        return MemoryUsage(4 * a, 4 * a, moments, whole, activations)
    layers = len(model.blocks)
    blocks = layers if strategy == "zero2" or stages > 1 else min(2, layers)
    parameters = blocks * block * (4 if precision == "fp32" else 2) + 4 * (a - layers * block)
    gradients = 4 * (a if portion < share else block)
    parts = 0 if config.distributed.cpu_offload else 4 * a / ranks
    state = 0 if config.distributed.cpu_offload else moments / ranks
    return MemoryUsage(parts, parts, state, parameters + gradients, activations)


def check_memory(
    need: MemoryUsage, config: Config, shape: GPTConfig, ranks: int, precision: str, device: str, room: int
) -> None:
    """Makes sure that a rank's memory holds what it will need.

    Args:
        need: what `expected` has found
        room: bytes of memory for each rank
        others: as for `expected`

    Raises:
        UserError: it does not; the message names the cheapest line to change after which it does.
    """
    if need.total <= room:
        return
    share = -(-config.trainer.batch_size // ranks)
    sizes = [2**power for power in reversed(range((config.trainer.micro_batch_size or share).bit_length() - 1))]
    changes = [("trainer", "micro_batch_size", format_bytes) for format_bytes in sizes]
    changes += [("trainer", "activation_checkpointing", "full")]
    changes += [("distributed", "strategy", name) for name in ("zero1", "zero2", "fsdp")[: 3 * (ranks > 1)]]
    advice = "use a smaller model, or more GPUs with distributed.strategy fsdp"
    for section, key, value in changes:
        try:
            changed = replace(config, **{section: replace(getattr(config, section), **{key: value})})
            check_shares(changed, ranks)
        except (ValueError, UserError):  # it does not go with the rest
            continue
        if estimate_memory(changed, shape, ranks, precision, device).total <= room:
            advice = f"set {section}.{key} to {value}"
            break
    raise UserError(
        f"out of memory before the first step: it needs {need}, and there are {format_bytes(room)}; {advice}"
    )


def is_oom_error(error: RuntimeError) -> bool:
    """Whether it says that memory ran out: CUDA's has a class of its own, the CPU's a text alone."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _moments(model: Stage, config: OptimizerConfig, ranks: int) -> int:
    """Bytes of optimizer state on the rank that has most: Muon keeps one average of each weight, AdamW two.

    Dealt out as ZeroRedundancyOptimizer does it: group by group, the largest first, to the rank that has least.
    """
    elements, needed = [0] * ranks, [0] * ranks
    for group in param_groups(model, config):
        for parameter in sorted(group["params"], key=lambda p: -p.numel()):
            rank = elements.index(min(elements))
            elements[rank] += parameter.numel()
            needed[rank] += parameter.numel() * (4 if group["muon"] else 8)
    return max(needed)


@lru_cache
def _activations(shape: GPTConfig, stage: int, stages: int, precision: str, recompute: str, device: str) -> float:
    """Bytes that forward keeps for backward, for each sequence, with those that backward makes again for a block."""
    layers, among = len(meta_model(shape, stage, stages).blocks), min(stages, 3)
    place = (stage > 0) + (stage == stages - 1) if among == 3 else stage  # first, in the middle or last

    def of_blocks(recompute: str) -> tuple[float, float]:
        small = (replace(shape, n_layer=count * among) for count in (1, 2))
        one, two = (_kept(part, place, among, precision, recompute, device) for part in small)
        return one, two - one

    first, block = of_blocks(recompute)
    again = 0.0
    if recompute != "none":
        again = of_blocks("none")[1]
    if recompute == "selective":
        # What is kept of products: query, key, value, attention, its projection, the MLP's two.
        block += 10 * shape.n_embd * shape.block_size * (4 if precision == "fp32" else 2)
    return first + (layers - 1) * block + again


def _kept(shape: GPTConfig, stage: int, stages: int, precision: str, recompute: str, device: str) -> int:
    """Bytes that a second sequence adds to what forward keeps for backward, counted on tensors without data."""
    counts = []
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    for B in (1, 2):
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor, storages: dict = storages) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            return tensor

        with FakeTensorMode(), torch.device(device):
            model, idx = Stage(shape, stage, stages), torch.zeros(B, shape.block_size, dtype=torch.long)
            x = torch.zeros(*idx.shape, shape.n_embd, requires_grad=True) if stage else idx
            for block in model.blocks:
                block.recompute = recompute
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with hooks, torch.autocast(device, dtype, enabled=precision != "fp32"):
                out = model(x)
                if stage == stages - 1:
                    cross_entropy(out, idx)
        counts.append(sum(storage.nbytes() for storage in storages.values()))
    return counts[1] - counts[0]
