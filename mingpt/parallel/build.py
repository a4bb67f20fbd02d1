"""From the configuration to a strategy.

A new strategy is a subclass of `Strategy` in a module of its own, an entry in STRATEGIES, and a value of
`distributed.strategy` in mingpt/config/schema.py.
"""

from importlib import import_module
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

STRATEGIES = {  # imported only if configured: some take most of a second
    "ddp": "strategy.DDP",
    "zero1": "sharded.ZeRO1",
    "zero2": "sharded.ZeRO2",
    "fsdp": "sharded.FSDP",
    "tree": "tree_reduction.TreeReduction",
    "pipeline": "pipeline.PipelineParallel",
}


def load_strategy(name: str) -> type[Strategy]:
    """The class that STRATEGIES names."""
    module, class_name = STRATEGIES[name].split(".")
    return getattr(import_module(f"mingpt.parallel.{module}"), class_name)


def strategy_class(config: Config) -> type[Strategy]:
    """The strategy of a configuration."""
    if config.distributed.pipeline_stages > 1:
        return load_strategy("pipeline")
    if config.distributed.reduction == "tree":
        return load_strategy("tree")
    return load_strategy(config.distributed.strategy)


def build_strategy(
    config: Config, model: GPT, context: DistributedContext, precision: str, example: tuple[Tensor, Tensor]
) -> Strategy:
    """Parallelizes a model as configured, with its optimizer. Weights are undefined until `load_full_state`.

    Args:
        model: a GPT on the meta device, since no rank may have memory for it; it becomes the strategy's
        precision: fp32, bf16 or fp16
        example: inputs and targets, (B, T) each, for a warm-up pass

    Raises:
        UserError: device, compiler or memory do not suffice.
    """
    cls = strategy_class(config)
    refuse(find_precision_conflicts(config, precision))
    memory = estimate_memory(config, model, context.world_size, precision)
    with shared_errors(context):
        if config.trainer.compile:
            check_compiler(context.device)
        check_memory(memory, context.device, context.local_world_size, context.world_size)
    if config.trainer.compile:
        with context.local_rank0_first():
            use_compile_cache(Path(config.trainer.run_dir) / "cache/compiled")
    with torch.compiler.set_stance("force_eager"):  # nothing is compiled for the one batch of `rebuild_buckets`
        if config.distributed.pipeline_stages > 1:
            strategy = cls(model, context, config, precision)
        else:
            strategy = parallelize(cls, model, context, config, precision)
            if isinstance(strategy, DDP):
                strategy.rebuild_buckets(strategy.compute_loss(strategy.model, *example))
    strategy.description["memory"] = f"{config.distributed.strategy}: {memory}"
    return strategy


def parallelize(
    cls: type[Strategy], model: nn.Module, context: DistributedContext, config: Config, precision: str
) -> Strategy:
    """The data-parallel strategy for a model, or for a stage of one, with activation checkpointing and compilation."""
    mode = config.trainer.activation_checkpointing
    apply_activation_checkpointing(model, mode)
    if config.trainer.compile:
        in_blocks = cls.compiles_blocks or mode != "none" or config.distributed.pipeline_stages > 1
        torch._dynamo.config.recompile_limit = 64  # uneven shares, short last batches and evaluation have own shapes
        for part in model.blocks if in_blocks else [model]:  # type: ignore[union-attr]
            part.compile(dynamic=False)
        # Splits a whole model at DDP's buckets, which are then sent during backward. On a CPU that is no faster, and a
        # later start takes 9 to 12 s instead of 4 (measured).
        torch._dynamo.config.optimize_ddp = not in_blocks and context.device.type != "cpu"
    if context.world_size == 1 and issubclass(cls, DDP):
        cls = Strategy
    return cls(model, context, config, precision)
