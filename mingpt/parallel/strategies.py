"""From the configuration to a strategy, and whether its memory suffices.

A new strategy is a subclass of `Strategy` in a module of its own, an entry in STRATEGIES, and a value of
`distributed.strategy` in mingpt/config.py.
"""

from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.config import Config
from mingpt.distributed.process_group import DistributedContext
from mingpt.parallel.data_parallel import Strategy
from mingpt.parallel.memory import MemoryUsage, activation_bytes, format_bytes, optimizer_bytes
from mingpt.parallel.parallelize import apply_activation_checkpointing, apply_compile, meta_stages, split_into_stages
from mingpt.utils.device import NCCL_BYTES, check_compiler, memory_per_rank
from mingpt.utils.errors import UserError

STRATEGIES = {  # imported only if configured: some take most of a second
    "ddp": "data_parallel.DDP",
    "zero1": "sharded.ZeRO1",
    "zero2": "sharded.ZeRO2",
    "fsdp": "sharded.FSDP",
    "tree": "tree_reduction.TreeReduction",
}


def strategy_class(config: Config) -> type[Strategy]:
    """The data-parallel strategy of a configuration."""
    cfg = config.distributed
    module, name = STRATEGIES["tree" if cfg.reduction == "tree" else cfg.strategy].split(".")
    return getattr(import_module(f"mingpt.parallel.{module}"), name)


def build_strategy(
    config: Config, model: nn.Module, context: DistributedContext, precision: str, example: tuple[Tensor, Tensor]
) -> Strategy:
    """Parallelizes a model as configured, with its optimizer. Weights are undefined until `load_full_state`.

    Args:
        model: a GPT on the meta device, since no rank may have memory for it; it becomes the strategy's
        precision: fp32, bf16 or fp16
        example: inputs and targets, (B, T) each, for a warm-up pass

    Raises:
        UserError: device, compiler or memory do not suffice.
    """
    strategy_class(config).validate_device(config, context.device, precision)
    if config.trainer.compile:
        context.raise_on_all_ranks(lambda: check_compiler(context.device))
    run = (config, model, context.world_size, precision, context.device.type)
    memory = MemoryUsage(**context.run_on_rank0(lambda: asdict(estimate_memory(*run))))
    available = memory_per_rank(context.device, context.local_world_size, context.world_size)
    context.raise_on_all_ranks(lambda: check_memory(memory, available, *run))
    description = format_memory(memory, config, model, context.world_size)
    if config.distributed.pipeline_stages > 1:
        strategy = _build_pipeline(config, model, context, precision)
    else:
        strategy = _parallelize(model, context, config, precision)
        strategy.warm_up(lambda: strategy.compute_loss(strategy.model, *example))
    strategy.estimated_memory = memory
    strategy.description["memory"] = description
    return strategy


def _build_pipeline(config: Config, model: Any, context: DistributedContext, precision: str) -> Strategy:
    from mingpt.parallel.pipeline import PipelineParallel, pipeline_groups, stage_io  # noqa: PLC0415 - takes long

    num_stages = config.distributed.pipeline_stages
    replicas, replica, embedding_group = pipeline_groups(context, num_stages)
    inner = _parallelize(split_into_stages(model, num_stages)[replica.rank], replicas, config, precision)
    received = torch.zeros_like(stage_io(model.config, 1, replica.rank, num_stages)[0], device=context.device)

    def forward() -> Tensor:
        with inner.autocast():
            return inner.model(received).sum()

    inner.warm_up(forward)
    return PipelineParallel(inner, context, replica, embedding_group, config, meta_stages(model, num_stages))


def _parallelize(model: nn.Module, context: DistributedContext, config: Config, precision: str) -> Strategy:
    apply_activation_checkpointing(model, config.trainer.activation_checkpointing)
    if config.trainer.compile:
        apply_compile(model)
    cls = strategy_class(config).for_world_size(context.world_size)
    return cls(model, context, config, precision)


def validate(config: Config, world_size: int) -> None:
    """Checks that the batch can be distributed over the ranks.

    Raises:
        UserError: names the key, and a value that would do.
    """
    if config.distributed.pipeline_stages > 1:
        _validate_pipeline(config, world_size)
    else:
        strategy_class(config).validate(config, world_size)


def _validate_pipeline(config: Config, ranks: int) -> None:
    stages, batch_size = config.distributed.pipeline_stages, config.trainer.batch_size
    size = config.trainer.micro_batch_size or batch_size
    if ranks % stages:
        raise UserError(
            f"distributed.pipeline_stages is {stages}, of which {ranks} processes are no multiple: start "
            f"{-(-ranks // stages) * stages} processes, or set it to 1"
        )
    replicas = ranks // stages
    if batch_size % (replicas * size):
        raise UserError(
            f"trainer.batch_size is {batch_size}, must be a multiple of {replicas * size} with "
            f"distributed.pipeline_stages {stages}: {replicas} replicas x trainer.micro_batch_size {size}, as all "
            "micro-batches of a pipeline have one size"
        )
    micro_batches = batch_size // replicas // size
    if micro_batches < stages and config.distributed.pipeline_schedule == "1f1b":
        raise UserError(
            f"trainer.batch_size / replicas / trainer.micro_batch_size is {batch_size} / {replicas} / {size}, "
            f"{micro_batches} micro-batches for {stages} stages, which would wait "
            f"{(stages - 1) / (micro_batches + stages - 1):.0%} of the time: lower trainer.micro_batch_size, or set "
            "distributed.pipeline_schedule to gpipe, which accepts it"
        )


def estimate_memory(config: Config, model: nn.Module, world_size: int, precision: str, device: str) -> MemoryUsage:
    """What the rank that needs most will hold.

    Args:
        model: a GPT; only its class and its configuration matter
        precision: fp32, bf16 or fp16
        device: type of the device
    """
    cfg, num_stages = config.trainer, config.distributed.pipeline_stages
    ranks = world_size // num_stages
    share = -(-cfg.batch_size // ranks)
    size = min(share, cfg.micro_batch_size or share)
    usages = []
    for i, stage in enumerate(meta_stages(model, num_stages)):
        mode, block_size = cfg.activation_checkpointing, stage.config.block_size
        per_sequence = activation_bytes(type(model), stage.config, i, num_stages, precision, mode, device)  # type: ignore[arg-type]
        activations = size * per_sequence
        if num_stages > 1:
            all_first = config.distributed.pipeline_schedule == "gpipe"
            activations *= share // size if all_first else min(share // size, num_stages - i)
            neighbors = (i > 0) + (i < num_stages - 1)
            activations += neighbors * share * 4 * block_size * stage.config.n_embd
        usages.append(strategy_class(config).estimate_memory(config, stage, ranks, precision, activations))
    return max(usages, key=lambda usage: usage.total)


def format_memory(usage: MemoryUsage, config: Config, model: nn.Module, world_size: int) -> str:
    """The estimate in words, with the size of a snapshot."""
    [full] = meta_stages(model)
    parameters, state = 4 * sum(p.numel() for p in full.parameters()), optimizer_bytes(full, config.optimizer)
    note = strategy_class(config).memory_note(parameters, state, world_size)
    return (
        f"{config.distributed.strategy}: {usage}{note if config.distributed.pipeline_stages == 1 else ''}; a "
        f"snapshot's {format_bytes(parameters + state)} are copied to host memory on the rank that writes it"
    )


def check_memory(
    usage: MemoryUsage,
    available: int,
    config: Config,
    model: nn.Module,
    world_size: int,
    precision: str,
    device: str,
) -> None:
    """Checks that a rank's memory suffices.

    Args:
        usage: what `estimate_memory` returned for the arguments from `config` on
        available: bytes of memory per rank

    Raises:
        UserError: it does not; names the cheapest change after which it would.
    """
    if usage.total <= available:
        return
    share = -(-config.trainer.batch_size // world_size)
    sizes = [2**power for power in reversed(range((config.trainer.micro_batch_size or share).bit_length() - 1))]
    changes = [("trainer", "micro_batch_size", size) for size in sizes]
    changes += [("trainer", "activation_checkpointing", "full")]
    changes += [("distributed", "strategy", name) for name in ("zero1", "zero2", "fsdp")[: 3 * (world_size > 1)]]
    advice = "use a smaller model, or more GPUs with distributed.strategy fsdp"
    for section, key, value in changes:
        try:
            changed = replace(config, **{section: replace(getattr(config, section), **{key: value})})
            validate(changed, world_size)
        except (ValueError, UserError):  # it does not go together with other keys
            continue
        if estimate_memory(changed, model, world_size, precision, device).total <= available:
            advice = f"set {section}.{key} to {value}"
            break
    there = format_bytes(available)
    if device == "cuda":
        there += " free on the GPU" + f", besides {format_bytes(NCCL_BYTES)} for NCCL's buffers" * (world_size > 1)
    raise UserError(f"out of memory before the first step: it needs {usage}, and there are {there}; {advice}")
