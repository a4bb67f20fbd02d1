"""Memory per rank: estimates before training, the check against what there is, and a step that runs out of memory."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_args, run_captured, run_each_captured, run_ranks
from torch import Tensor, nn

from mingpt.config import Config, GPTConfig
from mingpt.config_parser import read_config
from mingpt.loss import cross_entropy
from mingpt.parallel.memory import MemoryUsage, format_bytes
from mingpt.parallel.parallelize import split_into_stages
from mingpt.parallel.strategies import check_memory, estimate_memory
from mingpt.utils.errors import UserError, is_oom_error
from model import GPT
from trainer import Trainer


def build_gpt(**changes: Any) -> GPT:
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 64, "vocab_size": 11, "block_size": 32}
    return GPT(GPTConfig(**{"architecture": "gpt2", **sizes} | changes))


MODEL = build_gpt()
PARAMETERS = sum(parameter.numel() for parameter in MODEL.parameters())


def build_config(**changes: Any) -> Config:
    return read_config(run_args(Path("run"), "text.txt", **changes))


def estimate(ranks: int, model: GPT = MODEL, precision: str = "fp32", **changes: Any) -> MemoryUsage:
    return estimate_memory(build_config(**changes), model, ranks, precision, "cpu")


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_estimates_are_those_of_the_papers(strategy: str, ranks: int) -> None:
    usage = estimate(ranks, distributed__strategy=strategy, trainer__batch_size=8)
    shards = ranks if strategy in ("zero2", "fsdp") else 1
    assert (usage.parameters, usage.gradients) == (4 * PARAMETERS / shards, 4 * PARAMETERS / shards)
    if strategy == "zero1":  # whole parameters, so the largest shard is at least the mean
        assert 8 * PARAMETERS / ranks <= usage.optimizer <= 8 * PARAMETERS / ranks + 8 * 4 * 64 * 64
    else:
        assert usage.optimizer == 8 * PARAMETERS / shards


def test_estimates_depend_on_optimizer_and_accumulation() -> None:
    hidden = sum(p.numel() for block in MODEL.blocks for p in block.parameters() if p.dim() == 2)
    for strategy, shards in (("ddp", 1), ("fsdp", 2)):
        usage = estimate(2, distributed__strategy=strategy, optimizer__name="muon")
        assert usage.optimizer == (8 * PARAMETERS - 4 * hidden) / shards
    accumulated = estimate(2, distributed__strategy="zero2", trainer__micro_batch_size=1).unsharded
    zero2, fsdp = (
        estimate(2, distributed__strategy=name, trainer__micro_batch_size=None).unsharded for name in ("zero2", "fsdp")
    )
    assert fsdp < zero2 < 8 * PARAMETERS < accumulated + 4 * 64  # all gradients beside all parameters
    tree = estimate(2, distributed__reduction="tree", trainer__micro_batch_size=1)
    assert tree.unsharded == 4 * PARAMETERS * (1 + 3)  # of four micro-batches, the last and up to three partial sums


def kept_bytes(model: nn.Module, forward: Callable[[], Tensor | None]) -> int:
    """What a forward pass keeps for backward, besides parameters."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    assert out is not None  # it keeps the tensors until here
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["gpt2", "nanochat"])
def test_estimated_activations_are_those_that_forward_keeps(architecture: str, precision: str, dropout: float) -> None:
    """In bf16 with casts of the matrices.

    With dropout, attention in fp32 keeps scaled queries and keys that tensors without data do not show.
    """
    model, idx = build_gpt(architecture=architecture, dropout=dropout), torch.zeros(5, 32, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        found = kept_bytes(model, lambda: model(idx, idx)[1])
    usage = estimate(1, model, precision, trainer__batch_size=5, trainer__micro_batch_size=None)
    assert usage.activations + usage.unsharded == pytest.approx(found, rel=0.1 if dropout else 0.02)


@pytest.mark.parametrize("architecture", ["gpt2", "nanochat"])
def test_estimated_activations_of_a_stage_are_those_of_its_micro_batches_in_flight(architecture: str) -> None:
    """Of four micro-batches of 5; with receive buffers for all four, from each neighbor."""
    model, idx = build_gpt(architecture=architecture, n_layer=6), torch.zeros(5, 32, dtype=torch.long)
    stages = split_into_stages(model, 3)
    first, last = (lambda: stages[0](idx)), (lambda: cross_entropy(stages[2](torch.zeros(5, 32, 64)), idx))
    middle = lambda: stages[1](torch.zeros(5, 32, 64, requires_grad=True))  # noqa: E731
    kept = [kept_bytes(stage, forward) for stage, forward in zip(stages, (first, middle, last), strict=True)]
    size = {"model__n_layer": 6, "trainer__batch_size": 20, "trainer__micro_batch_size": 5}
    for schedule, in_flight in (("1f1b", (3, 2, 1)), ("gpipe", (4, 4, 4))):
        usages = [
            (16 * sum(p.numel() for p in stage.parameters()), n * kept[i] + (1, 2, 1)[i] * 20 * 32 * 64 * 4)
            for i, (stage, n) in enumerate(zip(stages, in_flight, strict=True))
        ]
        pipeline = {"distributed__pipeline_stages": 3, "distributed__pipeline_schedule": schedule}
        _, activations = max(usages, key=sum)
        assert estimate(3, model, **size, **pipeline).activations == pytest.approx(activations, rel=0.02)


def test_activation_checkpointing_keeps_less() -> None:
    none, selective, full = (
        estimate(1, trainer__activation_checkpointing=mode, trainer__batch_size=64, trainer__micro_batch_size=None)
        for mode in ("none", "selective", "full")
    )
    assert full.activations < 0.5 * none.activations < selective.activations < none.activations


ONE = {"trainer__batch_size": 8, "trainer__micro_batch_size": 1}
LARGE = {"trainer__batch_size": 64, "trainer__micro_batch_size": 32}


@pytest.mark.parametrize(
    ("share", "ranks", "options", "advice"),
    [
        (0.99, 1, LARGE | {"trainer__micro_batch_size": None}, "set trainer.micro_batch_size to 32"),
        (0.88, 1, LARGE | {"trainer__micro_batch_size": 2}, "set trainer.micro_batch_size to 1"),
        (0.95, 1, {"trainer__micro_batch_size": 1}, "set trainer.activation_checkpointing to full"),
        (0.75, 4, {"trainer__micro_batch_size": 1}, "set distributed.strategy to zero1"),
        (0.55, 8, ONE, "set distributed.strategy to zero2"),
        (0.5, 8, ONE, "set distributed.strategy to fsdp"),
        (0.8, 2, {"distributed__reduction": "tree", **LARGE}, "set trainer.micro_batch_size to 16"),
        (0.6, 2, {"distributed__reduction": "tree", "trainer__micro_batch_size": 1}, "use a smaller model"),
        (0.95, 2, {"trainer__batch_size": 8, "distributed__pipeline_stages": 2}, "set trainer.micro_batch_size to 1"),
        (0.01, 8, ONE, "use a smaller model"),
    ],
)
def test_too_little_memory_is_refused_with_the_cheapest_change(
    share: float, ranks: int, options: dict, advice: str
) -> None:
    usage, rest = estimate(ranks, **options), (build_config(**options), MODEL, ranks, "fp32", "cpu")
    check_memory(usage, int(usage.total), *rest)
    with pytest.raises(UserError, match=advice) as refused:
        check_memory(usage, int(share * usage.total), *rest)
    for number in (usage.total, int(share * usage.total)):
        assert format_bytes(number) in str(refused.value)


def test_on_a_gpu_the_message_says_what_is_free_and_what_nccl_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = estimate(1)
    monkeypatch.setattr("mingpt.parallel.strategies.estimate_memory", lambda *args: usage)
    for ranks, free in ((1, "free on the GPU;"), (2, "free on the GPU, besides 1.00 GiB for NCCL's buffers;")):
        with pytest.raises(UserError, match=rf"and there are 0\.0 MiB {free}"):
            check_memory(usage, 0, build_config(), MODEL, ranks, "fp32", "cuda")


def test_a_run_that_needs_too_much_memory_ends_before_the_first_step(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, model__n_embd=65536)
    [[(status, _, err)]] = run_ranks(1, run_each_captured, [argv], tmp_path=tmp_path)
    assert status == 2
    assert "out of memory before the first step" in err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_that_runs_out_of_memory_is_one_message(ranks: int, text: Path, tmp_path: Path) -> None:
    """On the last rank; the others report a failed rank."""
    options = {"model__n_embd": 64, "trainer__batch_size": 4096, "trainer__micro_batch_size": None}
    argv = run_args(tmp_path / "run", text, **options)
    *others, (status, _, err) = run_ranks(ranks, _limit_memory, ranks - 1, argv, tmp_path=tmp_path)
    assert status == 2
    assert err.startswith("error: out of memory in training: [enforce fail at alloc_cpu.cpp")
    for part in ("DefaultCPUAllocator: can't allocate memory: you tried", "trainer.micro_batch_size", "fsdp"):
        assert part in err
    assert "set trainer.activation_checkpointing to full" in err
    assert len(err.splitlines()) == 1
    for status, _, err in others:
        assert status == 1
        assert "rank 1 (" in err
        assert "can't allocate memory" in err


def _limit_memory(rank: int, argv: list[str]) -> tuple[int, str, str]:
    """Runs main.py; this rank may allocate 32 MiB in its first step, less than the batch needs."""
    train_step = Trainer.train_step

    def limited(trainer: Trainer) -> Any:
        if trainer.context.rank != rank:
            return train_step(trainer)
        before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 2**25, before[1]))
        try:
            return train_step(trainer)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    Trainer.train_step = limited  # type: ignore[method-assign]
    return run_captured(*argv)


def test_only_allocators_errors_are_out_of_memory_errors() -> None:
    assert is_oom_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_oom_error(RuntimeError("shape '[2]' is invalid for input of size 3"))
