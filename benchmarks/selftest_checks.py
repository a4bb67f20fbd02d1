"""The checks of selftest.py, except for injected faults. The first line of a check's docstring is its title.

All ranks run a check together and make the same collectives, so what only one of them has found is raised at the end. A
check returns what it found, and raises CheckFailedError if that is wrong, or SkippedError.
"""

import gc
import os
import re
import statistics
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import collect_env
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cluster_model import VOCAB_SIZE, flops_per_step
from benchmarks.harness import SMALL, Bench, Shape, SkippedError, machine_name
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext
from mingpt.parallel.memory import MemoryUsage, format_bytes
from mingpt.snapshot.storage import fingerprint, load_snapshot
from mingpt.utils.device import check_compiler, device_kind, has_bf16
from mingpt.utils.errors import UserError
from trainer import Trainer

Overrides = dict[str, Any]  # options of main.py, by key
STEPS = 20  # of a loss curve
FEW_STEPS = 8  # where bits are compared
# Largest relative error of a loss and of a gradient norm, beside fp32 on a CPU. Errors measured on CPUs: 2e-7 in fp32;
# 3e-4 and 2e-3 in bf16, which has three bits fewer than fp16.
TOLERANCES = {"fp32": (1e-3, 1e-2), "bf16": (1e-2, 1e-1), "fp16": (1e-2, 1e-1)}
FP16_SCALE = 2.0**10  # at GradScaler's own first scale, steps may overflow and be skipped
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
# The columns of the table of larger models in docs/configuration.md, as far as they matter for speed. At 124M
# parameters, a step has 4 micro-batches per rank in place of 40.
COLUMNS: dict[str, tuple[Shape, Overrides]] = {
    "default": (SMALL, {}),
    "10.7M": (Shape(6, 6, 384, 256, 64), {"model.dropout": 0.2, "optimizer.name": "adamw"}),
    "124M": (Shape(12, 12, 768, 1024, 48), {"optimizer.name": "adamw", "trainer.micro_batch_size": 12}),
}


class CheckFailedError(Exception):
    """A check found something wrong; the message says what."""


class Curve(NamedTuple):
    """Losses and gradient norms of a run's steps, and a digest of its state at the end."""

    losses: list[float]
    norms: list[float]
    digest: str


class SelfTest(Bench):
    """What all checks of a self-test share.

    Attributes:
        faults: the names of those injected so far
    """

    @cached_property
    def faults(self) -> list[str]:
        return []

    @cached_property
    def fault_dir(self) -> str:
        """The run folder of the run that faults interrupt."""
        return tempfile.mkdtemp(dir=self.folder)

    @cached_property
    def text(self) -> Path:
        """100,000 characters that a model learns within some steps, and the defaults of all keys beside it."""
        words = ["anna", "bob", "does", "eat", "figs", "\n"]
        file = self.folder / f"text{self.context.rank}.txt"
        file.write_text(" ".join(np.random.default_rng(0).choice(words, 25_000))[:100_000])
        file.with_suffix(".yaml").touch()
        return file

    def run_options(self, options: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> list[str]:
        """As in Bench, with the default of all other keys, whatever gpt2_train_cfg.yaml has."""
        return ["--config", str(self.text.with_suffix(".yaml")), *super().run_options(options, overrides)]


def share_groups(context: DistributedContext) -> None:
    """Makes trainers with equal groups of ranks share them, since NCCL's buffers for each take memory on the GPU."""
    subgroup, made = context.subgroup, dict[tuple[tuple[int, ...], ...], DistributedContext]()

    def subgroup_once(groups: Iterable[Sequence[int]]) -> DistributedContext:
        key = tuple(map(tuple, groups))
        if key not in made:
            made[key] = subgroup(key)
        return made[key]

    context.subgroup = subgroup_once  # type: ignore[method-assign]


def tiny_options(world_size: int) -> list[str]:
    """Options of main.py for a model of 0.1M parameters, with two micro-batches per rank or more."""
    values = {
        "model.dropout": 0.1,
        "optimizer.warmup_steps": 4,
        "trainer.max_steps": 40,
        "trainer.micro_batch_size": 2,
        "trainer.precision": "fp32",
        "trainer.threads": 1,
        "distributed.timeout_seconds": 120,
    }
    shape = Shape(2, 2, 64, 32, 4 * max(2, world_size))
    return [*shape.options, *(word for key, value in values.items() for word in (f"--{key}", str(value)))]


def strategy_options(test: SelfTest) -> dict[str, Overrides]:
    """The options that select each strategy that this number of ranks allows."""
    found: dict[str, Overrides] = {name: {"distributed.strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp")}
    found["tree"] = {"distributed.reduction": "tree"}
    if on_gpu(test):  # which the tree requires there
        found["tree"]["trainer.deterministic"] = "true"
    if test.context.world_size % 2 == 0:
        found["2 stages"] = {"distributed.pipeline_stages": 2}
    return found


def on_gpu(test: Bench) -> bool:
    return test.context.device.type == "cuda"


def require_gpu(test: SelfTest, reason: str = "it needs a CUDA GPU") -> None:
    if not on_gpu(test):
        raise SkippedError(reason)


def gpu_precisions(test: SelfTest) -> list[str]:
    return ["fp32", "fp16"] + ["bf16"] * has_bf16(test.context.device)[0]


@contextmanager
def open_trainer(
    test: SelfTest,
    overrides: Mapping[str, Any],
    options: Sequence[str] | None = None,
    context: DistributedContext | None = None,
    warmup_steps: int = 0,
) -> Iterator[Trainer]:
    """A trainer as `Bench.build_trainer` makes it, by default with `tiny_options`; exit releases its process groups."""
    gc.collect()  # an earlier trainer locks its run folder, and holds memory
    if on_gpu(test):
        torch.cuda.empty_cache()
    options = tiny_options(test.context.world_size) if options is None else options
    callbacks = test.context.exit_callbacks
    before = len(callbacks)
    try:
        trainer = test.build_trainer(options, overrides, context, warmup_steps)
        yield trainer
        trainer.snapshots.writer.wait()
    finally:
        while len(callbacks) > before:
            callbacks.pop()()
        torch.use_deterministic_algorithms(False)


def full_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Copies of all parameters and of their optimizer state, on the CPU of each rank."""
    return {
        name: {key: tensor.cpu().clone() for key, tensor in {"": weight, **state}.items()}
        for name, weight, state in trainer.strategy.iter_full_state()
    }


def train_curve(
    test: SelfTest, overrides: Mapping[str, Any], steps: int, context: DistributedContext | None = None
) -> Curve:
    """Trains a run of its own, or one that resumes in `trainer.run_dir`, and saves its last step there."""
    losses, norms = [], []
    with open_trainer(test, overrides, context=context) as trainer:
        if trainer.strategy.scaler.is_enabled():
            trainer.strategy.scaler.scale(torch.zeros((), device=trainer.context.device))  # creates the scale
            trainer.strategy.scaler.update(FP16_SCALE)
        for _ in range(steps):
            result = trainer.train_step()
            losses.append(trainer.strategy.mean_loss(result.losses).item())
            norms.append(result.grad_norm.item())
        trainer.save_snapshot(None, is_last=True)
        return Curve(losses, norms, fingerprint(full_state(trainer)))


def max_relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def machine(test: SelfTest) -> str:
    """GPUs, libraries, memory, compiler and attention."""
    names = test.context.all_gather_object(machine_name(test.context.device))
    facts = [f"{names.count(name)} rank{'s' * (names.count(name) > 1)} on {name}" for name in dict.fromkeys(names)]
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if driver and torch.version.cuda and not torch.cuda.is_available() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise CheckFailedError(f"there is a GPU with driver {driver}, but PyTorch {torch.__version__} can't use it")
    if driver and not torch.version.cuda:
        facts.append("there is a GPU, but this build of PyTorch is for CPUs")
    if on_gpu(test):
        free, total = (format_bytes(number) for number in torch.cuda.mem_get_info(test.context.device))
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
        facts += [f"driver {driver}", f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
        facts += [f"NCCL {nccl}", f"{free} of {total} free"]
    try:
        check_compiler(test.context.device)
        facts.append("compiler found")
    except UserError as error:
        facts.append(str(error).removeprefix("trainer.compile is true, but "))
    return ", ".join([*facts, f"attention: {_attention(test)}"])


class _Operations(TorchDispatchMode):
    """Records the names of the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _attention(test: SelfTest) -> str:
    """The operations of attention in a forward pass of the default configuration, in its precision."""
    options = replace(SMALL, B=max(SMALL.B, test.context.world_size)).options
    with open_trainer(test, {}, options) as trainer, _Operations() as operations:
        trainer.strategy.compute_loss(trainer.strategy.full_model, *trainer.train_data[range(2)])
    return ", ".join(sorted(name for name in operations.names if "dot_product" in name)) or "bmm"


def fp32(test: SelfTest) -> str:
    """Losses of each strategy in fp32, beside fp32 on a CPU."""
    return _compare_curves(test, "fp32")


def bf16(test: SelfTest) -> str:
    """Losses of each strategy in bf16, beside fp32 on a CPU."""
    if on_gpu(test) and not has_bf16(test.context.device)[0]:
        raise SkippedError("this GPU has no bf16 hardware")
    return _compare_curves(test, "bf16")


def fp16(test: SelfTest) -> str:
    """Losses of each strategy in fp16, beside fp32 on a CPU."""
    require_gpu(test)
    return _compare_curves(test, "fp16")


def _compare_curves(test: SelfTest, precision: str) -> str:
    overrides: Overrides = {"model.dropout": 0}
    reference = train_curve(test, overrides, STEPS, DistributedContext(RankInfo()))
    errors = {}
    for name, strategy in strategy_options(test).items():
        if (name, precision) != ("tree", "fp16"):
            curve = train_curve(test, overrides | strategy | {"trainer.precision": precision}, STEPS)
            pairs = (curve.losses, reference.losses), (curve.norms, reference.norms)
            errors[name] = [max_relative_error(*pair) for pair in pairs]
    limits, kinds = TOLERANCES[precision], ("losses", "gradient norms")
    wrong = [
        f"{name}'s {kind} differ by {error:.2g} (allowed {limit:g})"
        for name in errors
        for kind, error, limit in zip(kinds, errors[name], limits, strict=True)
        if not error <= limit  # also if it is NaN
    ]
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    found = (
        f"{kind} within {max(error):.1g} (allowed {limit:g})"
        for kind, error, limit in zip(kinds, zip(*errors.values(), strict=True), limits, strict=True)
    )
    return f"{', '.join(errors)}: {', '.join(found)}"


def waits(test: SelfTest) -> str:
    """No step waits for the GPU (cuda.set_sync_debug_mode)."""
    require_gpu(test)
    options, found = strategy_options(test), {}
    for name, precision in product(options, gpu_precisions(test)):
        if (name, precision) == ("tree", "fp16"):
            continue
        overrides = options[name] | {"trainer.precision": precision}
        # A warning, unlike an error, leaves the ranks in step, and shows all places.
        with open_trainer(test, overrides, warmup_steps=3) as trainer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(3):
                    trainer.train_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places = {f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)}
        if places:
            found[f"{name} in {precision}"] = sorted(places)
    if found:
        raise CheckFailedError("; ".join(f"{case}: {', '.join(places)}" for case, places in found.items()))
    return f"no step of {', '.join(options)} in {', '.join(gpu_precisions(test))}"


def deterministic(test: SelfTest) -> str:
    """Two runs with trainer.deterministic have the same bits."""
    return _compare_bits(test, lambda overrides: [train_curve(test, overrides, FEW_STEPS) for _ in range(2)])


def resume(test: SelfTest) -> str:
    """An interrupted and resumed run has the same bits."""

    def run_both(overrides: Overrides) -> list[Curve]:
        whole = train_curve(test, overrides, FEW_STEPS)
        overrides = overrides | {"trainer.run_dir": tempfile.mkdtemp(dir=test.folder)}
        first, second = (train_curve(test, overrides, FEW_STEPS // 2) for _ in range(2))
        return [whole, Curve(first.losses + second.losses, first.norms + second.norms, second.digest)]

    return _compare_bits(test, run_both)


def _compare_bits(test: SelfTest, run_both: Callable[[Overrides], list[Curve]]) -> str:
    names, wrong = strategy_options(test), []
    for name, overrides in names.items():
        one, other = run_both(overrides | {"trainer.deterministic": "true"})
        if one != other:
            pairs = enumerate(zip(one.losses, other.losses, strict=True), start=1)
            wrong.append(f"{name} from step {next((step for step, (a, b) in pairs if a != b), FEW_STEPS)} on")
    if wrong:
        raise CheckFailedError(f"other bits with {'; '.join(wrong)}")
    return f"{', '.join(names)}: the same bits after {FEW_STEPS} steps"


def tree(test: SelfTest) -> str:
    """reduction: tree has the same bits on any number of ranks."""
    context, overrides = test.context, strategy_options(test)["tree"]
    if context.world_size == 1:
        raise SkippedError("there is one rank: start it with torchrun --nproc_per_node=N")
    curves = {}
    for ranks in range(1, context.world_size + 1):
        groups = [range(ranks), range(ranks, context.world_size)]
        group = context.subgroup([group for group in groups if group])
        if context.rank < ranks:
            curves[ranks] = train_curve(test, overrides, FEW_STEPS, group)
        context.all_gather_object(None)  # the others wait
    wrong = [ranks for ranks, curve in curves.items() if curve != curves[context.world_size]]
    if wrong:
        raise CheckFailedError(f"other bits on {', '.join(map(str, wrong))} ranks than on {context.world_size}")
    return f"the same bits on 1 to {context.world_size} ranks after {FEW_STEPS} steps"


def default(test: SelfTest) -> str:
    """How far two runs without trainer.deterministic differ."""
    require_gpu(test, "on a CPU all kernels are deterministic")
    found = []
    for name, overrides in strategy_options(test).items():
        if name != "tree":
            one, other = (train_curve(test, overrides, STEPS) for _ in range(2))
            error = max_relative_error(one.losses, other.losses)
            found.append(f"{name} {'equal bits' if one == other else f'losses by {error:.1g}'}")
    return f"{', '.join(found)} after {STEPS} steps"


def snapshot(test: SelfTest) -> str:
    """A snapshot written during steps is the state at its own."""
    names, wrong = strategy_options(test), []
    for name, overrides in names.items():
        with open_trainer(test, overrides, warmup_steps=3) as trainer:
            expected, step = full_state(trainer), trainer.step
            storage, goes_on = trainer.snapshots.storage, threading.Event()
            write = storage.write

            def write_later(*args: Any, write: Any = write, goes_on: Any = goes_on) -> str:
                goes_on.wait(60)
                return write(*args)

            storage.write = write_later  # type: ignore[assignment, method-assign]
            trainer.save_snapshot(None, is_last=False)
            for _ in range(3):
                trainer.train_step()
            goes_on.set()
            trainer.snapshots.writer.wait()
            if test.context.rank in trainer.snapshots.writer_ranks:
                saved = load_snapshot(storage.file(step))
                found = {key: {"": weight, **saved["optimizer"][key]} for key, weight in saved["model"].items()}
                if fingerprint(found) != fingerprint(expected):
                    wrong.append(name)
    if wrong:
        raise CheckFailedError(f"the file has other bits than the state at its step with {', '.join(wrong)}")
    return f"{', '.join(names)}: the file has the bits of a blocking copy"


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
        usages, peaks = test.context.all_gather_object(trainer.memory), test.context.all_gather_object(peak)
        return trainer.strategy.estimated_memory, max(filter(None, usages), key=lambda usage: usage.total), max(peaks)


def speed(test: SelfTest) -> str:
    """Tokens per second and MFU of three models.

    MFU: model FLOP utilization, the operations of a step that count in flops_per_step, in those of the GPU's peak.
    """
    require_gpu(test)
    found = []
    for name, (shape, overrides) in COLUMNS.items():
        text = _gpt2_text(test) if name == "124M" else {}
        try:
            options = replace(shape, B=max(shape.B, test.context.world_size)).options
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
    share = max(1, shape.B // (4 * test.context.world_size))  # a quarter of a rank's, for strategies that accumulate
    options = replace(shape, B=4 * share * test.context.world_size).options
    found, test.pairs = [], 3
    for name, strategy in strategy_options(test).items():
        if name == "ddp":
            continue
        common = overrides | ({"trainer.micro_batch_size": share} if name in ("tree", "2 stages") else {})
        with (
            open_trainer(test, common, options, warmup_steps=3) as ddp,
            open_trainer(test, common | strategy, options, warmup_steps=3) as other,
        ):
            ratio = statistics.median(test.ratio(other.train_step, ddp.train_step))
        found.append(f"{name} {ratio:.2f}")
    return f"{', '.join(found)} of ddp's, 10.7M parameters"
