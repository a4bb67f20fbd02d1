"""Memory per rank: estimates before training, the check of free memory, and a step that runs out of memory."""

import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.config.parser import read_config
from mingpt.config.schema import GPTConfig
from mingpt.errors import UserError
from mingpt.parallel.memory import MemoryUsage, check_memory, estimate_memory, format_bytes
from model import GPT
from tests.helpers import DEVICES, ranks_on, run_args, run_captured, run_on, run_ranks
from trainer import Trainer

with torch.device("meta"):
    MODEL = GPT(GPTConfig(architecture="gpt2", n_layer=3, n_head=2, n_embd=64, vocab_size=11, block_size=32))
PARAMETERS = sum(parameter.numel() for parameter in MODEL.parameters())


def estimate(ranks: int, precision: str = "fp32", **changes: Any) -> MemoryUsage:
    config = read_config(run_args(Path("run"), "text.txt", **changes))
    return estimate_memory(config, MODEL, ranks, precision)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_estimates_follow_the_papers(strategy: str, ranks: int) -> None:
    usage = estimate(ranks, distributed__strategy=strategy, trainer__batch_size=8)
    shards = ranks if strategy in ("zero2", "fsdp") else 1
    optimizer_shards = 1 if strategy == "ddp" else ranks
    assert (usage.parameters, usage.gradients) == (4 * PARAMETERS / shards, 4 * PARAMETERS / shards)
    assert usage.optimizer == 8 * PARAMETERS / optimizer_shards


def test_estimates_depend_on_optimizer_and_accumulation() -> None:
    hidden = sum(p.numel() for block in MODEL.blocks for p in block.parameters() if p.dim() == 2)
    for strategy, shards in (("ddp", 1), ("fsdp", 2)):
        usage = estimate(2, distributed__strategy=strategy, optimizer__name="muon")
        assert usage.optimizer == (8 * PARAMETERS - 4 * hidden) / shards
    accumulated = estimate(2, distributed__strategy="zero2", trainer__micro_batch_size=1).unsharded
    zero2 = estimate(2, distributed__strategy="zero2", trainer__micro_batch_size=None).unsharded
    fsdp = estimate(2, distributed__strategy="fsdp", trainer__micro_batch_size=None).unsharded
    assert fsdp < zero2 < accumulated == 8 * PARAMETERS  # all gradients and all parameters
    tree = estimate(2, distributed__reduction="tree", trainer__micro_batch_size=1)
    assert tree.unsharded == 4 * PARAMETERS * (1 + 3)  # the last of four micro-batches, and three partial sums
    stage = estimate(2, distributed__pipeline_stages=2, trainer__batch_size=8)  # 2 of 3 blocks, and the embeddings
    block = sum(parameter.numel() for parameter in MODEL.blocks[0].parameters())
    assert stage.parameters == 4 * (PARAMETERS - block)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("strategy", "optimizer"), [("ddp", "muon"), ("zero1", "adamw"), ("zero2", "adamw"), ("fsdp", "muon")]
)
def test_what_is_measured_after_a_step_is_what_was_estimated(
    strategy: str, optimizer: str, device: str, text: Path, tmp_path: Path
) -> None:
    ranks = ranks_on(device, 2)
    options = {"distributed__strategy": strategy, "optimizer__name": optimizer, "trainer__max_steps": 1}
    argv = run_args(tmp_path / "run", text, model__n_layer=4, model__n_embd=192, **options)
    [out] = run_on(device, ranks, [argv], tmp_path)
    [estimated, measured] = re.findall(
        r"parameters ([\d.]+) MiB, gradients ([\d.]+) MiB, optimizer state ([\d.]+) MiB", out
    )
    for found, expected in zip(measured, estimated, strict=True):
        # With zero1, ranks own whole parameters. The estimate does not include AdamW's step counters.
        assert float(found) == pytest.approx(float(expected), rel=0.3 if strategy == "zero1" else 0.03)
    for peak in re.findall(r"; at the peak ([\d.]+) MiB, activations included", out):  # on GPUs
        assert float(peak) > sum(map(float, measured))


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = estimate(1)
    monkeypatch.setattr("mingpt.parallel.memory.memory_per_rank", lambda *args: int(usage.total))
    check_memory(usage, torch.device("cpu"), 1, 1)
    monkeypatch.setattr("mingpt.parallel.memory.memory_per_rank", lambda *args: 2**20)
    with pytest.raises(UserError, match=r"without activations: .*; there are 1\.0 MiB; use a smaller model") as refused:
        check_memory(usage, torch.device("cpu"), 1, 1)
    assert format_bytes(usage.total) in str(refused.value)
    with pytest.raises(UserError, match=r"; there are 1\.0 MiB free on the GPU; use"):
        check_memory(usage, torch.device("cuda"), 1, 1)


def test_a_step_that_runs_out_of_memory_is_one_message(text: Path, tmp_path: Path) -> None:
    """tests/distributed/test_health.py tests this with two ranks, where the other rank reports a failed rank."""
    options = {"model__n_embd": 64, "trainer__batch_size": 4096, "trainer__micro_batch_size": None}
    argv = run_args(tmp_path / "run", text, **options)
    [(status, _, err)] = run_ranks(1, _limit_memory, argv, tmp_path=tmp_path)
    assert status == 2
    assert err.startswith("error: out of memory: [enforce fail at alloc_cpu.cpp")
    for part in ("DefaultCPUAllocator: can't allocate memory: you tried", "trainer.micro_batch_size", "fsdp"):
        assert part in err
    assert "set trainer.activation_checkpointing to full" in err
    assert len(err.splitlines()) == 1


def _limit_memory(argv: list[str]) -> tuple[int, str, str]:
    """Runs main.py. It may allocate 32 MiB in its first step, less than the batch needs."""
    train_step = Trainer.train_step

    def limited(trainer: Trainer) -> Any:
        before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 2**25, before[1]))
        try:
            return train_step(trainer)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    Trainer.train_step = limited  # type: ignore[method-assign]
    return run_captured(*argv)
