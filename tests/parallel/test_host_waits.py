"""Between log lines, Python does not read values of tensors with any strategy, so it never waits for a GPU."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import open_trainer, run_args, run_ranks, write_text
from trainer import Trainer

MISTAKE = "a strategy that reads the norm"
MUON = {"optimizer__name": "muon"}
ON_ONE_RANK: dict[str, dict[str, Any]] = {"adamw": {}, "muon": MUON, MISTAKE: {}}
ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"distributed__strategy": "zero1", **MUON},
    "zero2": {"distributed__strategy": "zero2", "trainer__activation_checkpointing": "selective"},
    "fsdp": {"distributed__strategy": "fsdp", "trainer__precision": "bf16", **MUON},
    "tree": {"distributed__reduction": "tree"},
    "stages": {"distributed__pipeline_stages": 2, "trainer__batch_size": 8, **MUON},
}
LAST = 8  # steps
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
}


class CountReads(TorchDispatchMode):
    """Counts operations that make Python wait for a tensor's values."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **kwargs or {})


def _reads_by_step(trainer: Trainer, reads_norm: bool) -> list[int]:
    """Trains, and returns the number of reads of each step and of everything that follows it.

    On a CPU, the trainer reads the norm and the loss of every step, because that is free. So from the norm of the
    gradient to the end of a step, the device claims to be another one.
    """
    cpu = trainer.context.device
    total_norm = trainer.strategy.total_norm
    train_step = trainer.train_step
    counts = []

    def norm_on_another_device(tensors: dict[str, Tensor]) -> Tensor:
        norm = total_norm(tensors)
        if trainer.progress.step + 1 < LAST:
            trainer.context.device = torch.device("xpu")
        if reads_norm:
            norm.item()
        return norm

    def counted_step() -> Any:
        trainer.context.device = cpu
        counts.append(reads.count)
        return train_step()

    with (
        CountReads() as reads,
        mock.patch.object(trainer.strategy, "total_norm", norm_on_another_device),
        mock.patch.object(trainer, "train_step", counted_step),
    ):
        assert trainer.train() == 0
    ends = [*counts[1:], reads.count]
    return [end - begin for begin, end in zip(counts, ends, strict=True)]


def _train_each(folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """For `run_ranks`."""
    found = {}
    options = dict.fromkeys(("trainer__max_steps", "trainer__eval_every", "trainer__save_every"), LAST)
    options |= {"trainer__log_every": 3, "trainer__save_overhead": None}
    for name, changes in runs.items():
        argv = run_args(folder / name, folder / "text.txt", **(options | changes))
        with open_trainer(*argv, rendezvous=name) as trainer:
            found[name] = _reads_by_step(trainer, reads_norm=name == MISTAKE)
    return found


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The number of reads of each step in each run, over all ranks."""
    folder = tmp_path_factory.mktemp("reads")
    write_text(folder / "text.txt")
    [found] = run_ranks(1, _train_each, folder, ON_ONE_RANK, tmp_path=folder)
    ranks = run_ranks(2, _train_each, folder, ON_TWO_RANKS, tmp_path=folder)
    return found | {name: [sum(counts) for counts in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


@pytest.mark.parametrize("name", [*ON_ONE_RANK, *ON_TWO_RANKS])
def test_only_steps_that_write_a_log_line_read_values(name: str, reads: dict[str, list[int]]) -> None:
    """Steps 1, 3, 6 and 8 do."""
    expected = [name == MISTAKE or step in (1, 3, 6, 8) for step in range(1, LAST + 1)]
    assert [count > 0 for count in reads[name]] == expected
