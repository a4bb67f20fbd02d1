"""Runs that tests of strategies and of pipeline stages share."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from model import Block
from tests.helpers import (
    NO_DROPOUT,
    assert_equal_snapshots,
    loss_curve,
    max_relative_error,
    newest_snapshot,
    open_trainer,
    run_args,
    run_on,
    train_losses,
    write_text,
)
from trainer import Trainer

Options = dict[str, Any]  # options of a run, by names such as trainer__batch_size

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
ARCHITECTURES = ("gpt2", "nanochat")
# Each strategy with each kind of activation checkpointing, so that all pairs of two options occur.
TRAINED: list[Options] = [
    {
        "model__architecture": ARCHITECTURES[(i // 2 + j // 2) % 2],
        "model__conv_kernel_size": (None, 3)[(i + i // 2 + j // 2) % 2],
        "distributed__strategy": strategy,
        "trainer__activation_checkpointing": mode,
        "trainer__micro_batch_size": 2 if (i + j) % 2 else None,
        "optimizer__name": "muon" if (i // 2 + j) % 2 else "adamw",
    }
    for i, strategy in enumerate(STRATEGIES)
    for j, mode in enumerate(("none", "selective", "full"))
]
# The default model and optimizer.
TRAINED += [
    {"model__architecture": "nanochat", "distributed__strategy": strategy, "optimizer__name": "muon"}
    for strategy in STRATEGIES
]
# In micro-batches of one sequence, because each shape is compiled.
COMPILED: list[Options] = [
    {
        "model__architecture": ARCHITECTURES[i % 2],
        "model__conv_kernel_size": 3 if i % 2 else None,
        "distributed__strategy": strategy,
        "trainer__activation_checkpointing": mode,
        "trainer__micro_batch_size": 1,
        "trainer__compile": True,
    }
    for i, (strategy, mode) in enumerate((("ddp", "none"), ("fsdp", "selective")))
]
RESUMED = list(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True))  # saved by, resumed by

# Enough blocks and micro-batches for two replicas of four stages.
PIPELINE: Options = {"model__n_layer": 4, "trainer__batch_size": 8, "trainer__micro_batch_size": 1}
SCHEDULED: list[Options] = [
    {
        "model__architecture": ARCHITECTURES[(i + j) % 2],
        "model__conv_kernel_size": 3 if j else None,
        "optimizer__name": "muon" if stages == 4 else "adamw",
        "distributed__pipeline_stages": stages,
        "distributed__pipeline_schedule": schedule,
    }
    for i, stages in enumerate((2, 4))
    for j, schedule in enumerate(("1f1b", "gpipe"))
]
COMBINED: list[Options] = [  # with two stages
    {"distributed__strategy": "zero1", "optimizer__name": "muon"},
    {"distributed__strategy": "zero2", "trainer__activation_checkpointing": "selective"},
    {"distributed__strategy": "fsdp", "trainer__activation_checkpointing": "full"},
    {"trainer__precision": "bf16", "model__architecture": "gpt2"},
    {"distributed__strategy": "fsdp", "trainer__compile": True},
]
# With three stages. In the default model, the middle stage has only the matrices of blocks.
MIDDLE_STAGE: list[Options] = [{"distributed__strategy": name, "optimizer__name": "muon"} for name in STRATEGIES]
PIPELINE_RESUMED = [(1, 1, "ddp"), (4, 4, "ddp"), (4, 2, "fsdp"), (2, 1, "fsdp")]  # ranks, stages, strategy


def with_stages(stages: int, **changes: Any) -> Options:
    return PIPELINE | {"distributed__pipeline_stages": stages} | changes


def train(
    folder: Path, ranks: int, runs: dict[str, Options], steps: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Trains without dropout, in run folders with these names. Returns the losses of each run."""
    folder.mkdir(parents=True, exist_ok=True)
    text = write_text(folder / "text.txt")
    every = dict.fromkeys(("trainer__max_steps", "trainer__eval_every", "trainer__save_every"), steps)
    argvs = [run_args(folder / name, text, **(NO_DROPOUT | every | options)) for name, options in runs.items()]
    run_on(device, ranks, argvs, folder, timeout=600)
    return {name: [loss for _, loss in loss_curve(folder / name)] for name in runs}


def loss_errors(folder: Path, ranks: int, runs: list[Options], steps: int = 12, device: str = "cpu") -> list[float]:
    """Returns the largest relative deviation of each run's losses from the same training in one process.

    That process uses ddp and the whole batch at once, without activation checkpointing and compilation.
    """
    names = (
        "model__architecture",
        "model__conv_kernel_size",
        "model__n_layer",
        "optimizer__name",
        "trainer__batch_size",
        "trainer__precision",
    )
    plain = [{name: run[name] for name in names if name in run} | {"trainer__micro_batch_size": None} for run in runs]
    distinct = {str(i): options for i, options in enumerate(plain) if options not in plain[:i]}
    expected = train(folder / f"plain-{ranks}", 1, distinct, steps, device)
    found = train(folder / str(ranks), ranks, {str(i): options for i, options in enumerate(runs)}, steps, device)
    return [max_relative_error(found[str(i)], expected[str(plain.index(p))]) for i, p in enumerate(plain)]


def resume(folder: Path, runs: list[tuple[str, Options]]) -> list[tuple[bool, list[float]]]:
    """For `run_ranks`: resumes runs of six steps each from these folders, with these options.

    Returns:
        for each run, whether weights and optimizer state equal the snapshot's, and the losses of the next three steps
    """
    results = []
    for i, (saved, options) in enumerate(runs):
        run_dir = Path(f"{os.environ['TEST_INIT_METHOD'].removeprefix('file://')}-{i}-run")  # the same on all ranks
        if os.environ.get("RANK", "0") == "0":
            shutil.copytree(folder / saved / "snapshots", run_dir / "snapshots")
        with open_trainer(*run_args(run_dir, folder / "text.txt", **(NO_DROPOUT | options)), rendezvous=i) as trainer:
            snapshot = newest_snapshot(folder / saved)
            assert snapshot["step"] == trainer.progress.step == 6
            found, expected = {}, {(name, ""): weight for name, weight in snapshot["model"].items()}
            expected |= {(name, key): t for name, state in snapshot["optimizer"].items() for key, t in state.items()}
            for name, weight, state in trainer.strategy.iter_full_state():
                found |= {(name, key): tensor.clone() for key, tensor in {"": weight, **state}.items()}
            is_equal = found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
            results.append((is_equal, train_losses(trainer, 3)))
    return results


def assert_exact_resume(folder: Path, ranks: int, runs: dict[str, Options], device: str = "cpu") -> None:
    """Trains eight steps at once, and again in two parts, in new processes: losses and snapshots must be equal."""
    text = write_text(folder / "text.txt")
    for part, stop in (("whole", 8), ("parts", 5), ("parts", 8)):
        schedule = {"trainer__max_steps": stop, "optimizer__decay_steps": 12, "trainer__deterministic": True}
        argvs = [run_args(folder / f"{name}-{part}", text, **options, **schedule) for name, options in runs.items()]
        run_on(device, ranks, argvs, folder)
    for name in runs:
        whole, parts = folder / f"{name}-whole", folder / f"{name}-parts"
        assert_equal_snapshots(whole, parts)
        assert loss_curve(whole) == loss_curve(parts)


@contextmanager
def overflowing_gradients(trainer: Trainer) -> Iterator[None]:
    """In the block, gradients of this rank overflow."""

    def overflow(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)

    block = next(module for module in trainer.strategy.full_model.modules() if isinstance(module, Block))
    handle = block.register_forward_hook(overflow)
    yield
    handle.remove()


def scale_and_skip(trainer: Trainer, overflow_on: int) -> tuple[list[float], list[bool]]:
    """Makes three steps with the CPU's gradient scaler. The second step overflows on one rank.

    Returns:
        the scale after each step, and whether the step changed weights or optimizer state
    """
    strategy, scales, changed = trainer.strategy, [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    strategy.scaler = trainer.guard.scaler = scaler

    def step_without_reading(optimizer: torch.optim.Optimizer) -> None:
        with mock.patch.object(Tensor, "item", side_effect=AssertionError("the host would wait for the device")):
            torch.amp.GradScaler.step(scaler, optimizer)

    def full_state() -> list[Tensor]:
        state = [(weight, *tensors.values()) for _, weight, tensors in strategy.iter_full_state()]
        return [tensor.clone() for tensors in state for tensor in tensors]

    scaler.step = step_without_reading
    for step in range(3):
        before = full_state()
        overflows = step == 1 and trainer.context.rank == overflow_on
        with overflowing_gradients(trainer) if overflows else nullcontext():
            trainer.train_step()
        changed.append(not all(map(torch.equal, before, full_state())))
        scales.append(scaler.get_scale())
    return scales, changed
