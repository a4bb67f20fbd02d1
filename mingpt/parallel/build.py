"""Builds the strategy that a configuration selects, with its optimizer, activation checkpointing and compilation.

A new strategy is a subclass of `Strategy`, a branch in `build_data_parallel`, and a value of `distributed.strategy` in
mingpt/config/schema.py. Strategies are imported only if they are used: some of the imports take most of a second.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from mingpt.config.conflicts import find_precision_conflicts, refuse
from mingpt.config.schema import Config
from mingpt.distributed.agreement import shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.parallel.activation_checkpointing import apply_activation_checkpointing
from mingpt.parallel.memory import check_memory, estimate_memory
from mingpt.parallel.strategy import DDP, Strategy
from mingpt.system.compile_cache import use_compile_cache
from mingpt.system.device import check_compiler
from model import GPT


def build_strategy(
    config: Config, model: GPT, context: DistributedContext, precision: str, example: tuple[Tensor, Tensor]
) -> Strategy:
    """Returns the strategy for a model. Its weights are undefined until `load_full_state`.

    Args:
        model: a GPT on the meta device, since a rank may not have memory for the full model; do not use it afterwards
        precision: fp32, bf16 or fp16
        example: inputs and targets, (B, T) each, for a warm-up pass

    Raises:
        UserError: the precision conflicts with the strategy, there is no compiler, or memory does not suffice.
    """
    refuse(find_precision_conflicts(config, precision))
    memory = estimate_memory(config, model, context.world_size, precision)
    with shared_errors(context):
        if config.trainer.compile:
            check_compiler(context.device)
        check_memory(memory, context.device, context.local_world_size, context.world_size)
    if config.trainer.compile:
        with context.local_rank0_first():
            use_compile_cache(Path(config.trainer.run_dir) / "cache/compiled")
    strategy: Strategy
    with torch.compiler.set_stance("force_eager"):  # do not compile anything for the one batch of `rebuild_buckets`
        if config.distributed.pipeline_stages > 1:
            from mingpt.parallel.pipeline import PipelineParallel

            strategy = PipelineParallel(model, context, config, precision)
        else:
            strategy = build_data_parallel(model, context, config, precision)
            if isinstance(strategy, DDP):
                strategy.rebuild_buckets(strategy.compute_loss(strategy.model, *example))
    strategy.description["memory"] = f"{config.distributed.strategy}: {memory}"
    return strategy


def build_data_parallel(model: nn.Module, context: DistributedContext, config: Config, precision: str) -> Strategy:
    """Returns the data-parallel strategy for a model, or for one pipeline stage of a model."""
    apply_activation_checkpointing(model, config.trainer.activation_checkpointing)
    if config.trainer.compile:
        compile_model(model, config, context.device)
    cfg = config.distributed
    if cfg.reduction == "tree":
        from mingpt.parallel.tree_reduction import TreeReduction

        return TreeReduction(model, context, config, precision)
    if context.world_size == 1 and not cfg.uses_fsdp:
        return Strategy(model, context, config, precision)
    if cfg.strategy == "ddp":
        return DDP(model, context, config, precision)
    from mingpt.parallel.sharded import FSDP, ZeRO1, ZeRO2

    if cfg.strategy == "zero1":
        return ZeRO1(model, context, config, precision)
    if cfg.strategy == "zero2":
        return ZeRO2(model, context, config, precision)
    return FSDP(model, context, config, precision)


def compile_model(model: nn.Module, config: Config, device: torch.device) -> None:
    """Compiles the whole model, or each block where ranks gather, recompute or exchange something between blocks."""
    cfg = config.distributed
    mode = config.trainer.activation_checkpointing
    in_blocks = cfg.uses_fsdp or cfg.pipeline_stages > 1 or mode != "none"
    torch._dynamo.config.recompile_limit = 64  # uneven shares, short last batches and evaluation add shapes
    for part in model.blocks if in_blocks else [model]:  # type: ignore[union-attr]
        part.compile(dynamic=False)
    # This splits a whole model at DDP's buckets, so that they are sent during backward. On a CPU, it is not faster, and
    # later starts take 9 to 12 s instead of 4 (measured).
    torch._dynamo.config.optimize_ddp = not in_blocks and device.type != "cpu"
