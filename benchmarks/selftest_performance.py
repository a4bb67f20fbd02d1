"""The checks of selftest.py that measure memory and speed."""

import gc
import re
import statistics
from dataclasses import asdict, replace

import numpy as np
import torch

from benchmarks.cluster_model import VOCAB_SIZE, flops_per_step
from benchmarks.harness import SMALL, Shape
from benchmarks.selftest_harness import (
    CheckFailedError,
    Overrides,
    SelfTest,
    on_gpu,
    open_trainer,
    require_gpu,
    strategy_options,
    tiny_options,
)
from mingpt.parallel.memory import MemoryUsage
from mingpt.utils.device import device_kind
from mingpt.utils.errors import UserError
from trainer import Trainer

# Dense bf16 FLOP/s with accumulation in fp32, by a word of torch.cuda.get_device_name. NVIDIA's data sheets; for
# GeForce its white papers. The first that fits counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
# The columns of the table of larger models in docs/configuration.md, as far as they matter for speed. Each rank has
# the whole batch, at 124M parameters a tenth of it.
COLUMNS: dict[str, tuple[Shape, Overrides]] = {
    "default": (SMALL, {}),
    "10.7M": (
        Shape(6, 6, 384, 256, 64),
        {"model.architecture": "gpt2", "model.dropout": 0.2, "optimizer.name": "adamw"},
    ),
    "124M": (
        Shape(12, 12, 768, 1024, 48),
        {"model.architecture": "gpt2", "optimizer.name": "adamw", "trainer.micro_batch_size": 12},
    ),
}


def memory(test: SelfTest) -> str:
    """Memory per rank, estimated and measured."""
    found, wrong = [], []
    for name, overrides in strategy_options(test).items():
        estimate, usage, peak = _measure_memory(test, overrides)
        kept = estimate.parameters + estimate.gradients + estimate.optimizer
        found.append(f"{name} {kept / 2**20:.1f}/{usage.total / 2**20:.1f}")
        if on_gpu(test):
            found[-1] += f" (peak {estimate.total / 2**20:.1f}/{peak / 2**20:.1f})"
        if abs(usage.total - kept) > 0.1 * kept:
            wrong.append(found[-1])
    if wrong:
        raise CheckFailedError(f"MiB estimated/measured differ: {', '.join(wrong)}")
    return f"MiB estimated/measured: {', '.join(found)}"


def _measure_memory(test: SelfTest, overrides: Overrides) -> tuple[MemoryUsage, MemoryUsage, int]:
    """The estimate, what the rank that has most holds between steps, and the peak of its allocator in bytes."""
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu(test) else 0
    if on_gpu(test):
        torch.cuda.reset_peak_memory_stats()
    options = tiny_options(test.context.world_size)
    if on_gpu(test):  # where a tiny model takes less than the workspaces of libraries
        options += ["--model.n_layer", "8", "--model.n_embd", "512", "--data.block_size", "256"]
    with open_trainer(test, overrides, options, warmup_steps=3) as trainer:
        peak = torch.cuda.max_memory_allocated() - before if on_gpu(test) else 0
        measured: MemoryUsage = trainer.memory  # type: ignore[assignment]  # after the warm-up steps
        usages = [MemoryUsage(**values) for values in test.context.all_gather_object(asdict(measured))]
        peaks = test.context.all_gather_object(peak)
        return trainer.strategy.estimated_memory, max(usages, key=lambda usage: usage.total), max(peaks)


def speed(test: SelfTest) -> str:
    """Tokens per second and MFU of three models.

    MFU: model FLOP utilization, the operations of a step that count in flops_per_step, in those of the GPU's peak.
    """
    require_gpu(test)
    found = []
    for name, (shape, overrides) in COLUMNS.items():
        text = _gpt2_text(test) if name == "124M" else {}
        try:
            options = replace(shape, B=shape.B * test.context.world_size).options
            for compiled in ("false", "true"):
                torch.compiler.reset()
                with open_trainer(test, overrides | text | {"trainer.compile": compiled}, options) as trainer:
                    found.append(f"{name}{' compiled' * (compiled == 'true')} {_measure_speed(test, trainer)}")
        except UserError as error:
            found.append(f"{name}: {error}")
    return "; ".join(found)


def _gpt2_text(test: SelfTest) -> Overrides:
    """A text with as many different characters as GPT-2 has tokens."""
    file, alphabet = test.folder / f"gpt2-{test.context.rank}.txt", range(0x20000, 0x20000 + VOCAB_SIZE)
    drawn = np.random.default_rng(0).choice(alphabet, 2 * 10**6)
    file.write_text("".join(map(chr, [*alphabet, *drawn.tolist()])), encoding="utf-8")
    return {"data.path": file}


def peak_flops(name: str) -> float | None:
    """The peak in PEAK_FLOPS of a GPU with this name."""
    return next((flops for key, flops in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)


def _measure_speed(test: SelfTest, trainer: Trainer) -> str:
    test.time_calls(trainer.train_step, 3)  # compiles
    times = test.context.broadcast_object(max(3, round(2 / test.time_calls(trainer.train_step))))
    seconds = test.time_calls(trainer.train_step, times) / times
    B, precision = trainer.config.trainer.batch_size, trainer.numerics.precision
    speed = f"{B * trainer.train_data.block_size / seconds:,.0f} tokens/s in {precision}"
    peak = peak_flops(device_kind(test.context.device))
    if peak is None or precision != "bf16":
        return speed
    mfu = flops_per_step(trainer.model_config, B) / seconds / (peak * test.context.world_size)
    return f"{speed} (MFU {mfu:.1%})"


def strategies(test: SelfTest) -> str:
    """The step of each strategy beside that of ddp."""
    require_gpu(test)
    shape, overrides = COLUMNS["10.7M"]
    options = replace(shape, B=shape.B * test.context.world_size).options
    found, test.pairs = [], 3
    for name, strategy in strategy_options(test).items():
        if name == "ddp":
            continue
        common = overrides | ({"trainer.micro_batch_size": shape.B // 4} if name in ("tree", "2 stages") else {})
        with (
            open_trainer(test, common, options, warmup_steps=3) as ddp,
            open_trainer(test, common | strategy, options, warmup_steps=3) as other,
        ):
            ratio = statistics.median(test.ratio(other.train_step, ddp.train_step))
        found.append(f"{name} {ratio:.2f}")
    return f"{', '.join(found)} of ddp's, 10.7M parameters"
