"""All strategies train one curve, write one snapshot, exchange gradients once, and save the memory that they should."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    MEMORY_KINDS,
    assert_equal_snapshots,
    loss_curve,
    max_relative_error,
    newest_snapshot,
    open_trainer,
    run_args,
    run_ranks,
    train_curves,
    train_losses,
    train_main,
)
from tables import STRATEGIES, combinations, memory_of_each, resume_each, save_each
from torch.profiler import ProfilerActivity, profile

from mingpt.config import GPTConfig
from model import GPT

# One truth


def test_every_strategy_trains_the_same_curve(text: Path, tmp_path: Path) -> None:
    """With accumulation on uneven shares, with and without activation checkpointing; the slow test has all of it."""
    some = [knobs for knobs in combinations(False) if knobs["trainer__micro_batch_size"]]
    [[plain]] = run_ranks(1, train_curves, tmp_path, [{}], 5, tmp_path=tmp_path)
    for found in run_ranks(3, train_curves, tmp_path, some, 5, tmp_path=tmp_path):
        for knobs, found_losses in zip(some, found, strict=True):
            assert max_relative_error(found_losses, plain) < 1e-5, knobs


def test_every_strategy_trains_in_bf16(text: Path, tmp_path: Path) -> None:
    """Sharded blocks arrive in bf16, layer norms too, so that their curve is DDP's to bf16's precision alone."""
    some = [{"distributed__strategy": strategy, "trainer__precision": "bf16"} for strategy in STRATEGIES]
    plain, *others = run_ranks(2, train_curves, tmp_path, some, 8, tmp_path=tmp_path)[0]
    for strategy, found in zip(STRATEGIES[1:], others, strict=True):
        assert max_relative_error(found, plain) < (1e-6 if strategy == "zero1" else 2e-3), strategy


@pytest.mark.slow
def test_every_strategy_trains_the_same_curve_with_muon(text: Path, tmp_path: Path) -> None:
    """Also where each rank has rows of the matrices, and, as with three ranks and two blocks, no whole one to move."""
    ways = [{"distributed__strategy": strategy, "optimizer__name": "muon"} for strategy in STRATEGIES]
    [[plain, adamw]] = run_ranks(1, train_curves, tmp_path, [ways[0], {}], 8, tmp_path=tmp_path)
    assert max_relative_error(plain, adamw) > 1e-3
    for found in run_ranks(3, train_curves, tmp_path, ways, 8, tmp_path=tmp_path):
        for way, found_losses in zip(ways, found, strict=True):
            assert max_relative_error(found_losses, plain) < 1e-5, way


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_combination_trains_the_same_long_curve(number: int, compiled: bool, text: Path, tmp_path: Path) -> None:
    [[plain]] = run_ranks(1, train_curves, tmp_path, [{}], 20, tmp_path=tmp_path)
    found, *_ = run_ranks(number, train_curves, tmp_path, combinations(compiled), 20, tmp_path=tmp_path, timeout=600)
    for knobs, found_losses in zip(combinations(compiled), found, strict=True):
        assert max_relative_error(found_losses, plain) < 1e-5, knobs


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_exact_under_every_strategy(strategy: str, optimizer: str, text: Path, tmp_path: Path) -> None:
    """On three ranks with uneven shares, dropout and accumulation."""
    knobs = {"distributed__strategy": strategy, "optimizer__name": optimizer, "optimizer__decay_steps": 12}
    argv = [
        run_args(tmp_path / name, text, trainer__max_steps=stop, **knobs)
        for name, stop in (("whole", 12), ("parts", 5), ("parts", 12))
    ]
    assert run_ranks(3, _train_all, argv, tmp_path=tmp_path) == [[0, 0, 0]] * 3
    assert_equal_snapshots(tmp_path / "whole", tmp_path / "parts")
    assert loss_curve(tmp_path / "whole") == loss_curve(tmp_path / "parts")


@pytest.mark.slow
def test_resume_is_exact_when_compiled(text: Path, tmp_path: Path) -> None:
    """With dropout, whose random numbers are then the compiler's."""
    knobs = {"trainer__compile": True, "trainer__micro_batch_size": 1, "optimizer__decay_steps": 12}
    argv = [
        run_args(tmp_path / name, text, trainer__max_steps=stop, **knobs)
        for name, stop in (("whole", 12), ("parts", 5), ("parts", 12))
    ]
    assert run_ranks(1, _train_all, argv[:1], tmp_path=tmp_path, timeout=300) == [[0]]
    for part in argv[1:]:  # a process each, as after a failure
        assert run_ranks(1, _train_all, [part], tmp_path=tmp_path, timeout=300) == [[0]]
    assert_equal_snapshots(tmp_path / "whole", tmp_path / "parts")
    assert loss_curve(tmp_path / "whole") == loss_curve(tmp_path / "parts")
    plain = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=2, block_size=2))
    assert (
        newest_snapshot(tmp_path / "parts")["model"].keys() == plain.state_dict().keys()
    )  # no names of the compiler's


def _train_all(argvs: list[list[str]]) -> list[int]:
    statuses, meeting = [], os.environ["TEST_INIT_METHOD"]
    for i, argv in enumerate(argvs):
        os.environ["TEST_INIT_METHOD"] = f"{meeting}-{i}"
        statuses.append(train_main(*argv))
    return statuses


# One snapshot


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with text.txt and a run of 6 steps by each strategy on two ranks, and the losses that follow."""
    from helpers import write_text

    folder = tmp_path_factory.mktemp("saved")
    write_text(folder / "text.txt")
    return folder, save_each(folder, 2)


@pytest.mark.parametrize("number", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_what_one_strategy_saved_any_other_resumes(number: int, saved: tuple[Path, list[float]]) -> None:
    folder, plain = saved
    for found in run_ranks(number, resume_each, folder, tmp_path=folder):
        assert len(found) == len(STRATEGIES) ** 2
        for way, (same_bits, after) in found.items():
            assert same_bits, way
            assert max_relative_error(after, plain) < 1e-5, way


# One exchange


def test_each_gradient_is_reduced_once_a_step(text: Path, tmp_path: Path) -> None:
    """In steps of two micro-batches on each rank; counted by the profiler, in numbers that are added up."""
    for found in run_ranks(2, _count_reduced, tmp_path, tmp_path=tmp_path):
        parameters = found.pop("parameters")
        for strategy, counts in found.items():
            rows = 2 * 15  # sharded tensors are filled up to a multiple of the ranks, at most a row of 16 for each
            assert parameters <= sum(counts) <= parameters + 16 * rows * (strategy in ("zero2", "fsdp")), strategy
            assert len(counts) == (3 if strategy in ("zero2", "fsdp") else 1), strategy  # two blocks and the rest


def _count_reduced(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        argv = run_args(folder / strategy, folder / "text.txt", distributed__strategy=strategy)
        with open_trainer(*argv, rendezvous=strategy) as made:
            train_losses(made, 1)
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
                made.train_step()
            found["parameters"] = sum(p.numel() for p in made.state.strategy.whole.parameters())
            reduced = [e for e in profiled.events() if e.name in ("gloo:all_reduce", "gloo:reduce_scatter")]
            found[strategy] = [n for e in reduced if (n := torch.Size(e.input_shapes[0]).numel()) > 1]
    return found


# All or none


def test_all_ranks_skip_a_step_that_overflows_on_one(text: Path, tmp_path: Path) -> None:
    """As fp16 does on GPUs, with the scaler of the CPU."""
    for found in run_ranks(2, _overflow, tmp_path, tmp_path=tmp_path):
        for strategy, (scales, moved) in found.items():
            assert scales == [1024.0, 512.0, 512.0], strategy
            assert moved == [True, False, True], strategy


def _overflow(folder: Path) -> dict[str, tuple[list[float], list[bool]]]:
    found = {}
    for strategy in STRATEGIES:
        argv = run_args(folder / strategy, folder / "text.txt", distributed__strategy=strategy)
        with open_trainer(*argv, rendezvous=strategy) as made:
            made.state.strategy.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            loss, scales, moved = made.state.strategy.loss, [], []
            for step in range(3):
                poison = float("inf") if step == 1 and made.context.rank == 1 else 1.0
                made.state.strategy.loss = lambda *args, by=poison, loss=loss: loss(*args) * by  # type: ignore[method-assign]
                before = [weight.clone() for _, weight, _ in made.state.strategy.state()] if step else []
                made.train_step()
                after = [weight.clone() for _, weight, _ in made.state.strategy.state()]
                moved.append(not before or not all(map(torch.equal, before, after)))
                scales.append(made.state.strategy.scaler.get_scale())
            found[strategy] = scales, moved
    return found


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_measured_bytes_are_those_of_the_formula_with_muon(number: int, text: Path, tmp_path: Path) -> None:
    found, *_ = run_ranks(number, memory_of_each, tmp_path, "muon", tmp_path=tmp_path)
    for strategy, (formula, held) in found.items():
        assert max(part.optimizer for part in held) == pytest.approx(formula.optimizer, rel=0.05), strategy


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_measured_bytes_are_those_of_the_formula(number: int, text: Path, tmp_path: Path) -> None:
    found, *_ = run_ranks(number, memory_of_each, tmp_path, tmp_path=tmp_path)
    for strategy, (formula, held) in found.items():
        for kind in MEMORY_KINDS:
            most = max(getattr(part, kind) for part in held)
            assert most == pytest.approx(getattr(formula, kind), rel=0.05), (strategy, kind)
    a = found["ddp"][0].parameters
    for strategy, share in {"ddp": 16, "zero1": 8 + 8 / number, "zero2": 16 / number, "fsdp": 16 / number}.items():
        mean = sum(sum(getattr(part, kind) for kind in MEMORY_KINDS) for part in found[strategy][1]) / number
        assert mean == pytest.approx(share * a / 4, rel=0.05), strategy
