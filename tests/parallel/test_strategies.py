"""All strategies have the same losses and snapshots, exchange gradients once per step, and use the estimated memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    MEMORY_KINDS,
    max_relative_error,
    newest_snapshot,
    open_trainer,
    run_args,
    run_ranks,
    small_gpt,
    train_curves,
    train_losses,
    write_text,
)
from torch.profiler import ProfilerActivity, profile

from tests.parallel.tables import (
    COMPILED,
    RESUMED,
    STRATEGIES,
    TRAINED,
    assert_exact_resume,
    loss_errors,
    measure,
    resume,
    train,
)

BY_NAME: dict[str, dict[str, Any]] = {name: {"distributed__strategy": name} for name in STRATEGIES}


@pytest.mark.parametrize(
    ("ranks", "steps"), [(3, 5), *(pytest.param(n, 12, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_all_strategies_train_with_the_same_losses(ranks: int, steps: int, tmp_path: Path) -> None:
    """With and without accumulation and activation checkpointing, on uneven shares, with both optimizers.

    With Muon and fsdp, each of three ranks has rows of all matrices, and with two blocks one updates no whole matrix.
    """
    runs = TRAINED if steps == 12 else [TRAINED[i] for i in (1, 5, 7, 9)]  # each strategy once
    for options, error in zip(runs, loss_errors(tmp_path, ranks, runs, steps), strict=True):
        assert error < 1e-5, options


@pytest.mark.slow
def test_compiled_blocks_train_with_the_same_losses(tmp_path: Path) -> None:
    for options, error in zip(COMPILED, loss_errors(tmp_path, 2, COMPILED), strict=True):
        assert error < 1e-5, options


@pytest.mark.slow
def test_resume_is_exact_with_every_strategy(tmp_path: Path) -> None:
    """On three ranks with uneven shares, dropout and accumulation; with Muon, AdamW trains some parameters."""
    runs = {name: {"optimizer__name": "muon", **options} for name, options in BY_NAME.items()}
    assert_exact_resume(tmp_path, 3, runs | {"adamw": {}})


@pytest.mark.slow
def test_resume_is_exact_with_compiled_blocks_whose_parameters_keep_their_names(tmp_path: Path) -> None:
    """With dropout, whose random numbers the compiler draws."""
    assert_exact_resume(tmp_path, 1, {"compiled": {"trainer__compile": True, "trainer__micro_batch_size": 1}})
    assert newest_snapshot(tmp_path / "compiled-parts")["model"].keys() == small_gpt().state_dict().keys()


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_each_strategy_resumes_what_another_saved(ranks: int, tmp_path: Path) -> None:
    train(tmp_path, 2, BY_NAME, 6)
    expected = train(tmp_path, 1, {"uninterrupted": {}}, 9)["uninterrupted"][6:]
    runs = [(saved, BY_NAME[name]) for saved, name in RESUMED]
    for results in run_ranks(ranks, resume, tmp_path, runs, tmp_path=tmp_path):
        for run, (is_equal, losses) in zip(runs, results, strict=True):
            assert is_equal, run
            assert max_relative_error(losses, expected) < 1e-5, run


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of several bodies by rank."""
    folder = tmp_path_factory.mktemp("two")
    write_text(folder / "text.txt")
    return run_ranks(2, _on_two_ranks, folder, tmp_path=folder)


def _on_two_ranks(folder: Path) -> dict[str, Any]:
    bf16 = [{"trainer__precision": "bf16", **BY_NAME[name]} for name in ("ddp", "fsdp")]
    results: dict[str, Any] = {"bf16": train_curves(folder, bf16, 8)}
    for name, options in BY_NAME.items():
        with open_trainer(*run_args(folder / name, folder / "text.txt", **options), rendezvous=name) as trainer:
            train_losses(trainer, 1)
            results[name] = _reduced_numbers(trainer), *_overflow(trainer)
    return results


def _reduced_numbers(trainer: Any) -> list[int]:
    """How many gradients each collective of a step reduces, as the profiler records them."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        trainer.train_step()
    collectives = [event for event in profiled.events() if event.name in ("gloo:all_reduce", "gloo:reduce_scatter")]
    return [n for event in collectives if (n := torch.Size(event.input_shapes[0]).numel()) > 1]


def _overflow(trainer: Any) -> tuple[list[float], list[bool]]:
    """Scales, and whether weights changed, in three steps of which the second overflows on rank 1."""
    strategy, scales, changed = trainer.strategy, [], []
    strategy.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    compute_loss = strategy.compute_loss
    for step in range(3):
        factor = float("inf") if step == 1 and trainer.context.rank == 1 else 1.0
        strategy.compute_loss = lambda *args, by=factor: compute_loss(*args) * by
        before = [weight.clone() for _, weight, _ in strategy.iter_full_state()]
        trainer.train_step()
        changed.append(not all(map(torch.equal, before, (weight for _, weight, _ in strategy.iter_full_state()))))
        scales.append(strategy.scaler.get_scale())
    return scales, changed


def test_fsdp_trains_in_bf16_with_the_losses_of_ddp(on_two_ranks: list[dict[str, Any]]) -> None:
    """To the precision of bf16, which the gathered weights have."""
    expected, found = on_two_ranks[0]["bf16"]
    assert 0 < max_relative_error(found, expected) < 2e-3


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_gradient_is_reduced_once_per_step(name: str, on_two_ranks: list[dict[str, Any]]) -> None:
    """With two micro-batches on each rank."""
    parameters = sum(parameter.numel() for parameter in small_gpt(vocab_size=13, block_size=16).parameters())
    sharded = name in ("zero2", "fsdp")
    padding = 2 * 15 * 16 * sharded  # at most a row of 16 for each of 15 tensors per block
    for results in on_two_ranks:
        numbers = results[name][0]
        assert parameters <= sum(numbers) <= parameters + padding
        assert len(numbers) == (3 if sharded else 1)  # two blocks and the rest


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_skip_a_step_that_overflows_on_one(name: str, on_two_ranks: list[dict[str, Any]]) -> None:
    """As in fp16 on GPUs, with the CPU's scaler."""
    for results in on_two_ranks:
        _, scales, changed = results[name]
        assert scales == [1024.0, 512.0, 512.0]
        assert changed == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_measured_memory_is_the_estimated(ranks: int, text: Path, tmp_path: Path) -> None:
    strategies = ("ddp",) if ranks == 1 else STRATEGIES
    runs = [{"optimizer__name": o, **BY_NAME[name]} for o in ("adamw", "muon") for name in strategies]
    found, *_ = run_ranks(ranks, measure, tmp_path, runs, tmp_path=tmp_path)
    for options, (estimate, usages) in zip(runs, found, strict=True):
        for kind in MEMORY_KINDS:
            most = max(getattr(usage, kind) for usage in usages)
            assert most == pytest.approx(getattr(estimate, kind), rel=0.05), (options, kind)
    parameters = found[0][0].parameters
    bytes_per_parameter = {"ddp": 16, "zero1": 8 + 8 / ranks, "zero2": 16 / ranks, "fsdp": 16 / ranks}
    for name, (_, usages) in zip(strategies, found, strict=False):
        mean = sum(usage.total for usage in usages) / ranks
        assert mean == pytest.approx(bytes_per_parameter[name] * parameters / 4, rel=0.05), name
