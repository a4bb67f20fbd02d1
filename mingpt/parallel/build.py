"""Builds the strategy that a configuration selects, with activation checkpointing and compilation.

A new strategy is a subclass of `Strategy`, a branch in `build_data_parallel`, and a value of `distributed.strategy` in
mingpt/config/schema.py. Strategies are imported only if they are used: some of the imports take most of a second.
"""

import torch
from torch import Tensor, nn

from mingpt.config.conflicts import find_conflicts, refuse
from mingpt.config.schema import Config
from mingpt.distributed.context import DistributedContext
from mingpt.parallel.activation_checkpointing import apply_activation_checkpointing
from mingpt.parallel.ddp import DDP
from mingpt.parallel.strategy import Strategy
from model import GPT


def build_strategy(config: Config, model: GPT, context: DistributedContext, precision: str) -> Strategy:
    """Returns the strategy for a model.

    Args:
        model: a GPT on the CPU; do not use it afterwards, since strategies shard it, or cut stages out of it
        precision: fp32, bf16 or fp16

    Raises:
        UserError: keys conflict, in a configuration that was not read by `read_config`.
    """
    refuse(find_conflicts(config))
    if config.distributed.pipeline_stages > 1:
        from mingpt.parallel.pipeline import PipelineParallel, Stages

        stages = Stages(model, context, config)
        inner = build_data_parallel(stages.model, stages.replicas, config, precision, stages.example())
        return PipelineParallel(stages, inner, context)
    idx = targets = torch.zeros(1, config.data.block_size, dtype=torch.long, device=context.device)
    return build_data_parallel(model, context, config, precision, (idx, targets))


def build_data_parallel(
    model: nn.Module, context: DistributedContext, config: Config, precision: str, example: tuple[Tensor, ...]
) -> Strategy:
    """Returns the data-parallel strategy for a model, or for one pipeline stage of a model.

    Args:
        model: a model on the CPU, which the strategy changes and moves to its device
        example: arguments of the model
    """
    apply_activation_checkpointing(model, config.trainer.activation_checkpointing)
    if config.trainer.compile:
        compile_model(model)
    cfg = config.distributed
    arguments = (model, context, config, precision)
    if not cfg.uses_fsdp:  # fully_shard moves one block after another, so a model may be larger than a device
        model.to(context.device)
    if cfg.reduction == "tree":
        from mingpt.parallel.tree_reduction import TreeReduction

        return TreeReduction(*arguments)
    if context.world_size == 1 and not cfg.uses_fsdp:
        if config.trainer.cuda_graphs:
            from mingpt.parallel.cuda_graphs import CUDAGraphs

            return CUDAGraphs(*arguments)
        return Strategy(*arguments)
    if cfg.strategy == "ddp":
        return DDP(*arguments, example)
    from mingpt.parallel.sharded import FSDP, ZeRO1, ZeRO2

    if cfg.strategy == "zero1":
        return ZeRO1(*arguments, example)
    if cfg.strategy == "zero2":
        return ZeRO2(*arguments)
    return FSDP(*arguments)


def compile_model(model: nn.Module) -> None:
    """Compiles each block, the head and the loss, which takes a fraction of the time of a whole model."""
    torch._dynamo.config.recompile_limit = 64  # uneven shares, short last batches and evaluation add shapes
    torch._dynamo.config.optimize_ddp = False  # it would split blocks at DDP's buckets
    for block in model.blocks.values():  # type: ignore[operator]
        block.compile(dynamic=False)
    for name in ("unembed", "loss"):
        setattr(model, name, torch.compile(getattr(model, name), dynamic=False))
