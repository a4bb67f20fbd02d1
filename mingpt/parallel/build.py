"""From the configuration to a strategy.

A new strategy is a subclass of `Strategy` in a module of its own, an entry in STRATEGIES, and a value of
`distributed.strategy` in mingpt/config.py.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.config import Config
from mingpt.distributed.collectives import DistributedContext
from mingpt.hardware.compile_cache import use_compile_cache
from mingpt.hardware.device import check_compiler
from mingpt.hardware.numerics import Numerics, choose_numerics
from mingpt.parallel.memory import check_memory, estimate_memory
from mingpt.parallel.parallelize import apply_activation_checkpointing, apply_compile
from mingpt.parallel.strategy import DDP, Strategy

STRATEGIES = {  # imported only if configured: some take most of a second
    "ddp": "strategy.DDP",
    "zero1": "sharded.ZeRO1",
    "zero2": "sharded.ZeRO2",
    "fsdp": "sharded.FSDP",
    "tree": "tree_reduction.TreeReduction",
}


def strategy_class(config: Config) -> type[Strategy]:
    """The data-parallel strategy of a configuration."""
    name: str = config.distributed.strategy
    if config.distributed.reduction == "tree":
        name = "tree"
    module, class_name = STRATEGIES[name].split(".")
    return getattr(import_module(f"mingpt.parallel.{module}"), class_name)


def validate(config: Config, world_size: int) -> None:
    """Checks that the batch can be distributed over the ranks.

    Raises:
        UserError: names the key, and a value that would do.
    """
    if config.distributed.pipeline_stages > 1:
        from mingpt.parallel.pipeline import PipelineParallel  # noqa: PLC0415 - takes long

        PipelineParallel.validate(config, world_size)
    else:
        strategy_class(config).validate(config, world_size)


def agree_on_numerics(config: Config, context: DistributedContext, header: dict[str, Any] | None) -> Numerics:
    """Chooses precision and threads, the same on all ranks, and applies what does not belong to the strategy.

    Args:
        header: that of the snapshot that the run continues from, whose choices are kept where possible; None: it is new

    Raises:
        UserError: the device does not support the precision, or ranks choose different ones.
    """
    needs_one_thread = strategy_class(config).needs_one_thread
    with context.shared_errors():
        numerics = choose_numerics(
            config.trainer,
            context.device,
            context.world_size,
            context.local_world_size,
            needs_one_thread,
            header["choices"] if header else {},
        )
    context.check_equal({"what trainer.precision: auto gives": numerics.precision}, advice="set it to either")
    return numerics


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
    memory = estimate_memory(config, model, context.world_size, precision)
    with context.shared_errors():
        if config.trainer.compile:
            check_compiler(context.device)
        check_memory(memory, context.device, context.local_world_size, context.world_size)
    if config.trainer.compile:
        with context.local_rank0_first():
            use_compile_cache(Path(config.trainer.run_dir) / "cache/compiled")
    if config.distributed.pipeline_stages > 1:
        strategy = _build_pipeline(config, model, context, precision)
    else:
        strategy = _parallelize(model, context, config, precision)
        if isinstance(strategy, DDP):
            with torch.compiler.set_stance("force_eager"):  # nothing is compiled for this one batch
                strategy.rebuild_buckets(strategy.compute_loss(strategy.model, *example))
    strategy.description["memory"] = f"{config.distributed.strategy}: {memory}"
    return strategy


def _build_pipeline(config: Config, model: Any, context: DistributedContext, precision: str) -> Strategy:
    from mingpt.parallel.pipeline import (  # noqa: PLC0415 - takes long
        PipelineParallel,
        pipeline_groups,
        split_into_stages,
        stage_input,
    )

    groups = pipeline_groups(context, config.distributed.pipeline_stages)
    stages = split_into_stages(model, config.distributed.pipeline_stages)
    shapes = [dict(stage.named_parameters()) for stage in stages]  # on the meta device, also when one is built
    stage = stages[groups.pipeline.rank]
    inner = _parallelize(stage, groups.data_parallel, config, precision)
    if isinstance(inner, DDP):
        received = torch.zeros_like(stage_input(stage, batch_size=1), device=context.device)
        with inner.autocast(), torch.compiler.set_stance("force_eager"):
            output = inner.model(received)
        inner.rebuild_buckets(output.sum())
    return PipelineParallel(inner, context, groups, config, stage, shapes)


def _parallelize(model: nn.Module, context: DistributedContext, config: Config, precision: str) -> Strategy:
    apply_activation_checkpointing(model, config.trainer.activation_checkpointing)
    cls = strategy_class(config)
    if config.trainer.compile:
        is_checkpointed = config.trainer.activation_checkpointing != "none"
        is_stage = config.distributed.pipeline_stages > 1
        in_blocks = cls.compiles_blocks or is_checkpointed or is_stage
        apply_compile(model, in_blocks)
        # Splits a whole model at DDP's buckets, which are then sent during backward. On a CPU that is no faster, and a
        # later start takes 9 to 12 s instead of 4 (measured).
        torch._dynamo.config.optimize_ddp = not in_blocks and context.device.type != "cpu"
    if context.world_size == 1 and issubclass(cls, DDP):
        cls = Strategy
    return cls(model, context, config, precision)
