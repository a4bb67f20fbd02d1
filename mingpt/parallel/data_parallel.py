"""Builds data-parallel strategies, with activation checkpointing and compilation.

A new strategy is a subclass of `Strategy`, a branch in `build_data_parallel`, and a value of `distributed.strategy` in
mingpt/config/schema.py. Strategies are imported only if they are used: some of the imports take most of a second.
"""

import torch
from torch import Tensor, nn

from mingpt.config.schema import Config
from mingpt.distributed.context import DistributedContext
from mingpt.parallel.activation_checkpointing import apply_activation_checkpointing
from mingpt.parallel.strategy import DDP, Strategy


def build_data_parallel(
    model: nn.Module, context: DistributedContext, config: Config, precision: str, example: Tensor
) -> Strategy:
    """Returns the data-parallel strategy for a model, or for one pipeline stage of a model.

    Args:
        example: an input of the model
    """
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
        return DDP(model, context, config, precision, example)
    from mingpt.parallel.sharded import FSDP, ZeRO1, ZeRO2

    if cfg.strategy == "zero1":
        return ZeRO1(model, context, config, precision, example)
    if cfg.strategy == "zero2":
        return ZeRO2(model, context, config, precision)
    return FSDP(model, context, config, precision)


def compile_model(model: nn.Module, config: Config, device: torch.device) -> None:
    """Compiles the whole model, or each block if something is gathered, recomputed or sent between blocks."""
    cfg = config.distributed
    mode = config.trainer.activation_checkpointing
    in_blocks = cfg.uses_fsdp or cfg.pipeline_stages > 1 or mode != "none"
    torch._dynamo.config.recompile_limit = 64  # uneven shares, short last batches and evaluation add shapes
    for part in model.blocks if in_blocks else [model]:  # type: ignore[union-attr]
        part.compile(dynamic=False)
    # This splits a whole model at DDP's buckets, so that they are sent during backward. On a CPU, it is not faster, and
    # later starts take 9 to 12 s instead of 4 (measured).
    torch._dynamo.config.optimize_ddp = not in_blocks and device.type != "cpu"
