"""Runs and changes of the program that tests of strategies share."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from char_dataset import CharDataset
from mingpt.nn.layers import IGNORE_INDEX
from model import GPT, MLP, Block
from tests.faults.runs import assert_same_run
from tests.helpers import NO_DROPOUT, loss_curve, run_args, run_each_captured, run_on, write_text
from tests.inside import max_relative_error, newest_snapshot, open_trainer, train_losses
from trainer import Trainer

Options = dict[str, Any]  # options of a run, by names such as trainer__batch_size

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
# Enough blocks and micro-batches for two replicas of four stages.
PIPELINE: Options = {"model__n_layer": 4, "trainer__batch_size": 8, "trainer__micro_batch_size": 1}


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
    names = ("model__n_layer", "optimizer__name", "trainer__batch_size", "trainer__precision")
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
        with open_trainer(*run_args(run_dir, folder / "text.txt", **(NO_DROPOUT | options))) as trainer:
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
        assert_same_run(whole, parts)


def scale_and_skip(trainer: Trainer, overflow_on: int) -> tuple[list[float], list[bool]]:
    """Makes three steps with the CPU's gradient scaler. In the second step, gradients overflow on one rank.

    Returns:
        the scale after each step, and whether the step changed weights or optimizer state
    """
    strategy, scales, changed = trainer.strategy, [], []
    strategy.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def full_state() -> list[Tensor]:
        state = [(weight, *tensors.values()) for _, weight, tensors in strategy.iter_full_state()]
        return [tensor.clone() for tensors in state for tensor in tensors]

    def overflow(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad and len(scales) == 1 and trainer.context.rank == overflow_on:
            output.register_hook(lambda gradient: gradient * math.inf)

    block = next(module for module in strategy.full_model.modules() if isinstance(module, Block))
    block.register_forward_hook(overflow)
    for _ in range(3):
        before = full_state()
        trainer.train_step()
        changed.append(not all(map(torch.equal, before, full_state())))
        scales.append(scaler.get_scale())
    return scales, changed


# Changes that people make


def run_changed(change: Callable[[], None], argvs: list[list[str]]) -> list[tuple[int, str, str]]:
    """For `run_ranks`: changes the program, then calls `run_each_captured`."""
    change()
    return run_each_captured(argvs)


FROZEN = ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.ln_1.weight")


def add_auxiliary_loss() -> None:
    """Each MLP leaves a loss, which GPT.forward adds in training."""
    forward = MLP.forward
    forward_gpt = GPT.forward

    def forward_with_loss(self: MLP, x: Tensor) -> Tensor:
        y = forward(self, x)
        self.loss = (1 + y).square().mean()
        return y

    def add_losses(self: GPT, *args: Any, **options: Any) -> Any:
        logits, loss = forward_gpt(self, *args, **options)
        if self.training:
            loss = loss + sum(block.mlp.loss for block in self.blocks.values())
        return logits, loss

    MLP.forward = forward_with_loss
    GPT.forward = add_losses


def count_one_token_only() -> None:
    """Samples have different numbers of targets, and some have none."""
    read = CharDataset.__getitem__

    def read_masked(self: CharDataset, samples: range) -> tuple[Tensor, Tensor]:
        idx, targets = read(self, samples)
        return idx, targets.masked_fill(targets != 2, IGNORE_INDEX)

    CharDataset.__getitem__ = read_masked


def change_buffers(is_new: bool) -> None:
    """Adds a count of passes in training, and an average over the samples of this rank, to each MLP.

    With `is_new`, passes assign new tensors, and do not change them in place.
    """
    init: Any = MLP.__init__
    forward = MLP.forward

    def with_buffers(self: Any, *args: Any) -> None:
        init(self, *args)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(()))

    def changing(self: Any, x: Tensor) -> Tensor:
        if self.training:
            count = self.count + 1
            average = self.average.lerp(x.detach().abs().max().float(), 0.1)
            if is_new:
                self.count = count
                self.average = average
            else:
                self.count.copy_(count)
                self.average.copy_(average)
        return forward(self, x) * (self.average + self.count / 100)

    MLP.__init__ = with_buffers  # type: ignore[method-assign]
    MLP.forward = changing  # type: ignore[method-assign]


def freeze() -> None:
    build = GPT.__init__

    def build_frozen(self: GPT, config: Any) -> None:
        build(self, config)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name not in FROZEN

    GPT.__init__ = build_frozen
