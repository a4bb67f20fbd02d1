"""The checks of selftest.py for the machine, results and bits. The first line of a check's docstring is its title.

All ranks run a check together and make the same collectives, so what only one of them has found is raised at the end. A
check returns what it found, and raises CheckFailedError if that is wrong, or SkippedError.
"""

import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import SMALL, SkippedError, machine_name, max_relative_error
from benchmarks.selftest_harness import (
    CheckFailedError,
    Curve,
    Overrides,
    SelfTest,
    full_state,
    on_gpu,
    open_trainer,
    require_gpu,
    strategy_options,
    train_curve,
)
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext
from mingpt.parallel.memory import format_bytes
from mingpt.snapshot.storage import fingerprint, load_snapshot
from mingpt.utils.device import check_compiler, has_bf16
from mingpt.utils.errors import UserError

STEPS = 20  # of a loss curve
FEW_STEPS = 8  # where bits are compared
# Largest relative error of a loss and of a gradient norm, beside fp32 on a CPU. Errors measured on CPUs: 2e-7 in fp32;
# 3e-4 and 2e-3 in bf16, which has three bits fewer than fp16.
TOLERANCES = {"fp32": (1e-3, 1e-2), "bf16": (1e-2, 1e-1), "fp16": (1e-2, 1e-1)}


def gpu_precisions(test: SelfTest) -> list[str]:
    return ["fp32", "fp16"] + ["bf16"] * has_bf16(test.context.device)[0]


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
