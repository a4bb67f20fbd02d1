"""What a rank's memory must hold, told beforehand; that it is also what is held, test_strategy.py measures."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from helpers import run_args, run_captured

from mingpt.config import Config, GPTConfig
from mingpt.config_parser import read_config
from mingpt.parallel.memory import MemoryUsage, _of_stage, check_memory, estimate_memory, format_bytes, is_oom_error
from mingpt.utils.errors import UserError
from model import GPT, Stage, cross_entropy
from trainer import Trainer

SHAPE = GPTConfig(n_layer=3, n_head=2, n_embd=64, vocab_size=11, block_size=32)


def config(**changes: Any) -> Config:
    return read_config(run_args("run", "text.txt", **changes))


def need(ranks: int, precision: str = "fp32", **changes: Any) -> MemoryUsage:
    return estimate_memory(config(**changes), SHAPE, ranks, precision, "cpu")


def test_parts_are_those_of_the_papers() -> None:
    a = sum(parameter.numel() for parameter in GPT(SHAPE).parameters())
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        for ranks in (1, 2, 8):
            found = need(ranks, distributed__strategy=strategy)
            share = ranks if strategy in ("zero2", "fsdp") else 1
            assert (found.parameters, found.gradients) == (4 * a / share, 4 * a / share)
            if strategy == "zero1":  # dealt out whole: the largest part is at least the mean
                assert 8 * a / ranks <= found.optimizer <= 8 * a / ranks + 8 * 4 * 64 * 64
            else:
                assert found.optimizer == 8 * a / share
    hidden = sum(p.numel() for block in GPT(SHAPE).blocks for p in block.parameters() if p.dim() == 2)
    for strategy, share in (("ddp", 1), ("fsdp", 2)):
        found = need(2, distributed__strategy=strategy, optimizer__name="muon")
        assert found.optimizer == (8 * a - 4 * hidden) / share
    accumulated = need(2, distributed__strategy="zero2", trainer__micro_batch_size=1)
    at_once = need(2, distributed__strategy="zero2", trainer__micro_batch_size=None)
    assert at_once.whole < 8 * a < accumulated.whole + 4 * 64  # all gradients whole, beside all parameters
    assert need(2, distributed__strategy="fsdp", trainer__micro_batch_size=None).whole < at_once.whole


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_forward_keeps(precision: str, dropout: float) -> None:
    """Counted on a real forward pass; in bf16 it keeps casts of the matrices, too.

    With dropout, attention in fp32 keeps scaled copies of queries and keys that tensors without data don't show.
    """
    shape = GPTConfig(n_layer=3, n_head=2, n_embd=64, vocab_size=11, block_size=32, dropout=dropout)
    model, idx, kept = GPT(shape), torch.zeros(5, 32, dtype=torch.long), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        _, loss = model(idx, idx)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    real = sum(storage.nbytes() for storage in kept.values())
    told = estimate_memory(config(trainer__batch_size=5, trainer__micro_batch_size=None), shape, 1, precision, "cpu")
    assert told.activations + told.whole == pytest.approx(real, rel=0.1 if dropout else 0.02)
    assert loss is not None


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stages_activations_are_what_its_forward_keeps(stage: int) -> None:
    """Of micro-batches of 5, as many as are on their way behind it, and places to receive all four in."""
    shape = GPTConfig(n_layer=6, n_head=2, n_embd=64, vocab_size=11, block_size=32)
    model, kept = Stage(shape, stage, 3), {}
    x = torch.zeros(5, 32, 64, requires_grad=True) if stage else torch.zeros(5, 32, dtype=torch.long)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
        loss = cross_entropy(out, torch.zeros(5, 32, dtype=torch.long)) if stage == 2 else out
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    real = sum(storage.nbytes() for storage in kept.values())
    assert loss.requires_grad
    received = (2 if stage == 1 else 1) * 20 * 32 * 64 * 4
    for schedule, on_their_way in (("1f1b", 3 - stage), ("gpipe", 4)):
        knobs = {"trainer__batch_size": 20, "trainer__micro_batch_size": 5, "distributed__pipeline_stages": 3}
        knobs |= {"model__n_layer": 6, "distributed__pipeline_schedule": schedule}
        told = _of_stage(config(**knobs), shape, stage, 1, "fp32", "cpu")
        assert told.activations == pytest.approx(on_their_way * real + received, rel=0.02)


def test_checkpointing_keeps_less() -> None:
    none, selective, full = (
        need(1, trainer__activation_checkpointing=how, trainer__batch_size=64, trainer__micro_batch_size=None)
        for how in ("none", "selective", "full")
    )
    assert full.activations < 0.5 * none.activations < selective.activations < none.activations


@pytest.mark.parametrize(
    ("room", "ranks", "knobs", "advice"),
    [
        (0.99, 1, {"trainer__batch_size": 64, "trainer__micro_batch_size": None}, "set trainer.micro_batch_size to 32"),
        (0.88, 1, {"trainer__batch_size": 64, "trainer__micro_batch_size": 2}, "set trainer.micro_batch_size to 1"),
        (0.95, 1, {"trainer__micro_batch_size": 1}, "set trainer.activation_checkpointing to full"),
        (0.75, 4, {"trainer__micro_batch_size": 1}, "set distributed.strategy to zero1"),
        (0.55, 8, {"trainer__batch_size": 8, "trainer__micro_batch_size": 1}, "set distributed.strategy to zero2"),
        (0.5, 8, {"trainer__batch_size": 8, "trainer__micro_batch_size": 1}, "set distributed.strategy to fsdp"),
        (
            0.8,
            2,
            {"distributed__reduction": "tree", "trainer__micro_batch_size": 2},
            "set trainer.micro_batch_size to 1",
        ),
        (0.6, 2, {"distributed__reduction": "tree", "trainer__micro_batch_size": 1}, "use a smaller model"),
        (0.95, 2, {"trainer__batch_size": 8, "distributed__pipeline_stages": 2}, "set trainer.micro_batch_size to 1"),
        (0.01, 8, {"trainer__batch_size": 8, "trainer__micro_batch_size": 1}, "use a smaller model"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_cheapest_way_out(
    room: float, ranks: int, knobs: dict, advice: str
) -> None:
    wanted = need(ranks, **knobs)
    check_memory(wanted, config(**knobs), SHAPE, ranks, "fp32", "cpu", int(wanted.total))
    with pytest.raises(UserError, match=advice) as refused:
        check_memory(wanted, config(**knobs), SHAPE, ranks, "fp32", "cpu", int(room * wanted.total))
    assert format_bytes(wanted.total) in str(refused.value)


def test_a_run_that_cannot_fit_ends_at_once(text: Any, tmp_path: Any) -> None:
    argv = run_args(tmp_path / "run", text, model__n_embd=65536)
    [(status, _, err)] = conftest.ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert "out of memory before the first step" in err


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_memory_that_runs_out_in_a_step_is_one_message(number: int, text: Path, tmp_path: Path) -> None:
    """On the last rank; the others hear of it as of any crash."""
    knobs = {"model__n_embd": 64, "trainer__batch_size": 4096, "trainer__micro_batch_size": None}
    *others, (status, _, err) = conftest.ranks(
        number, _short_of_memory, number - 1, run_args(tmp_path / "run", text, **knobs), tmp_path=tmp_path
    )
    assert status == 2
    assert err.startswith("error: out of memory in training: [enforce fail at alloc_cpu.cpp")
    for words in ("DefaultCPUAllocator: can't allocate memory: you tried", "trainer.micro_batch_size", "fsdp"):
        assert words in err
    assert "set trainer.activation_checkpointing to full" in err
    assert len(err.splitlines()) == 1
    for status, _, err in others:
        assert status == 1
        assert "rank 1 (" in err
        assert "can't allocate memory" in err


def _short_of_memory(rank: int, argv: list[str]) -> tuple[int, str, str]:
    """A rank may take 32 MiB more in its first step, which is less than a batch needs."""
    step = Trainer.train_step

    def short(trainer: Trainer) -> Any:
        if trainer.context.rank != rank:
            return step(trainer)
        before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 2**25, before[1]))
        try:
            return step(trainer)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    Trainer.train_step = short  # type: ignore[method-assign]
    return run_captured(*argv)


def test_cudas_own_error_counts_as_memory_that_ran_out_and_others_do_not() -> None:
    assert is_oom_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_oom_error(RuntimeError("shape '[2]' is invalid for input of size 3"))
