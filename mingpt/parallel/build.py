"""Builds the strategy that a configuration selects."""

import torch

from mingpt.config.conflicts import find_conflicts, refuse
from mingpt.config.schema import Config
from mingpt.distributed.agreement import shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.parallel.data_parallel import build_data_parallel
from mingpt.parallel.strategy import Strategy
from mingpt.system.device import check_compiler
from model import GPT


def build_strategy(config: Config, model: GPT, context: DistributedContext, precision: str) -> Strategy:
    """Returns the strategy for a model.

    Args:
        model: a GPT on the CPU; do not use it afterwards, since strategies shard it, or cut stages out of it
        precision: fp32, bf16 or fp16

    Raises:
        UserError: the precision conflicts with the strategy, or a compiler is missing.
    """
    refuse(find_conflicts(config, precision))
    with shared_errors(context):
        if config.trainer.compile:
            check_compiler(context.device)
    if config.distributed.pipeline_stages > 1:
        from mingpt.parallel.pipeline import PipelineParallel  # a slow import

        return PipelineParallel(model, context, config, precision)
    idx = targets = torch.zeros(1, config.data.block_size, dtype=torch.long, device=context.device)
    return build_data_parallel(model, context, config, precision, (idx, targets))
