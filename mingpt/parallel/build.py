"""Builds the strategy that a configuration selects."""

from pathlib import Path

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
    with shared_errors(context):  # no rank compiles before all of them have called `use_compile_cache`
        if config.trainer.compile:
            from mingpt.system.compile_cache import use_compile_cache  # a slow import

            check_compiler(context.device)
            use_compile_cache(Path(config.trainer.run_dir) / "cache/compiled")
    if config.distributed.pipeline_stages > 1:
        from mingpt.parallel.pipeline import PipelineParallel  # a slow import

        return PipelineParallel(model, context, config, precision)
    idx = targets = torch.zeros(1, config.data.block_size, dtype=torch.long, device=context.device)
    return build_data_parallel(model, context, config, precision, (idx, targets))
