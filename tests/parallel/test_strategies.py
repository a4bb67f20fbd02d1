"""All strategies have the same losses and snapshots, and exchange gradients once per step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.helpers import SLOW_ON_CPU, ranks_on, run_args, run_ranks, write_text
from tests.inside import max_relative_error, newest_snapshot, open_trainer, small_gpt, train_losses
from tests.parallel.runs import STRATEGIES, Options, assert_exact_resume, loss_errors, resume, scale_and_skip, train

BY_NAME: dict[str, Options] = {name: {"distributed__strategy": name} for name in STRATEGIES}
# Each strategy with each kind of activation checkpointing, so that all pairs of two options occur.
TRAINED: list[Options] = [
    {
        "distributed__strategy": strategy,
        "trainer__activation_checkpointing": mode,
        "trainer__micro_batch_size": 2 if (i + j) % 2 else None,
        "optimizer__name": "muon" if (i // 2 + j) % 2 else "adamw",
    }
    for i, strategy in enumerate(STRATEGIES)
    for j, mode in enumerate(("none", "selective", "full"))
]
TRAINED += [{"optimizer__name": "muon", **options} for options in BY_NAME.values()]  # the default model and optimizer
# One block, in micro-batches of one sequence, because each shape is compiled.
COMPILED: Options = {"trainer__compile": True, "trainer__micro_batch_size": 1, "model__n_layer": 1}
WITH_MUON = {f"{name} with muon": {"optimizer__name": "muon", **BY_NAME[name]} for name in ("ddp", "zero1", "fsdp")}


@pytest.mark.parametrize(
    ("device", "ranks", "steps"),
    [
        ("cpu", 3, 5),
        *(pytest.param("cpu", n, 8, marks=pytest.mark.slow) for n in (1, 4)),
        pytest.param("cuda", 3, 5, marks=pytest.mark.gpu),
    ],
)
def test_all_strategies_train_with_the_same_losses(device: str, ranks: int, steps: int, tmp_path: Path) -> None:
    """With and without accumulation and activation checkpointing, on uneven shares, with both optimizers.

    With Muon and fsdp on three ranks, each rank has rows of all matrices. Two blocks have two matrices of each shape,
    so one rank does not orthogonalize any.
    """
    runs = TRAINED if steps == 8 else [TRAINED[i] for i in (1, 5, 7, 9)]  # each strategy once
    errors = loss_errors(tmp_path, ranks_on(device, ranks), runs, steps, device)
    for options, error in zip(runs, errors, strict=True):
        assert error < (1e-5 if device == "cpu" else 1e-4), options


@pytest.mark.slow
def test_compiled_models_and_blocks_train_with_the_same_losses(tmp_path: Path) -> None:
    blocks = {"distributed__strategy": "fsdp", "trainer__activation_checkpointing": "selective"}
    runs = [COMPILED, {**blocks, **COMPILED}]
    assert max(loss_errors(tmp_path, 2, runs)) < 1e-5


@pytest.mark.parametrize("device", SLOW_ON_CPU)
def test_resume_is_exact_with_every_strategy(device: str, tmp_path: Path) -> None:
    """On three ranks with uneven shares, dropout and accumulation; with Muon, AdamW trains some parameters."""
    runs = {name: {"optimizer__name": "muon", **options} for name, options in BY_NAME.items()}
    runs["adamw"] = {}
    assert_exact_resume(tmp_path, ranks_on(device, 3), runs, device)


@pytest.mark.slow
def test_resume_is_exact_with_a_compiled_model_whose_parameters_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, where compiled code draws random numbers, and on three ranks, where DDP's buckets change sums."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # only the first start compiles
    assert_exact_resume(tmp_path, 3, {"compiled": COMPILED})
    assert newest_snapshot(tmp_path / "compiled-parts")["model"].keys() == small_gpt(n_layer=1).state_dict().keys()


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_each_strategy_resumes_what_another_saved(ranks: int, tmp_path: Path) -> None:
    train(tmp_path, 2, BY_NAME, 6)
    expected = train(tmp_path, 1, {"uninterrupted": {}}, 9)["uninterrupted"][6:]
    runs = [(saved, BY_NAME[name]) for saved, name in zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True)]
    for results in run_ranks(ranks, resume, tmp_path, runs, tmp_path=tmp_path):
        for run, (is_equal, losses) in zip(runs, results, strict=True):
            assert is_equal, run
            assert max_relative_error(losses, expected) < 1e-5, run


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of `_on_two_ranks`, by rank."""
    folder = tmp_path_factory.mktemp("two")
    write_text(folder / "text.txt")
    return run_ranks(2, _on_two_ranks, folder, tmp_path=folder)


def _on_two_ranks(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # the first one of a process has once recorded nothing (torch 2.10)
    for name, options in (BY_NAME | WITH_MUON).items():
        with open_trainer(*run_args(folder / name, folder / "text.txt", **options)) as trainer:
            train_losses(trainer, 1)
            results[name] = _reduced_numbers(trainer), *scale_and_skip(trainer, overflow_on=1)
    return results


def _reduced_numbers(trainer: Any) -> list[int]:
    """Returns the number of gradients that each collective of a step reduces, from the profiler's record."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        trainer.train_step()
    collectives = [event for event in profiled.events() if event.name in ("gloo:all_reduce", "gloo:reduce_scatter")]
    return [n for event in collectives if (n := torch.Size(event.input_shapes[0]).numel()) > 1]


def test_fsdp_trains_in_bf16_with_the_losses_of_ddp(tmp_path: Path) -> None:
    """To the precision of bf16: fsdp gathers all weights in bf16, including the weights of layer norms."""
    runs = {name: {"trainer__precision": "bf16", **BY_NAME[name]} for name in ("ddp", "fsdp")}
    expected, found = train(tmp_path, 2, runs, 8).values()
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


@pytest.mark.parametrize("name", [*STRATEGIES, *WITH_MUON])
def test_all_ranks_skip_a_step_that_overflows_on_one(name: str, on_two_ranks: list[dict[str, Any]]) -> None:
    """Like in fp16 on GPUs, with the CPU's scaler."""
    for results in on_two_ranks:
        _, scales, changed = results[name]
        assert scales == [1024.0, 512.0, 512.0]
        assert changed == [True, False, True]
