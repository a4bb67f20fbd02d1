"""A step does not read values of tensors with any strategy, so Python never waits for a GPU in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import run_args, run_ranks
from tests.inside import open_trainer
from tests.parallel.runs import Options

MUON = {"optimizer__name": "muon"}
RUNS: dict[int, dict[str, Options]] = {  # by number of ranks
    1: {"adamw": {}, "muon": MUON},
    2: {
        "ddp": {},
        "zero1": {"distributed__strategy": "zero1", **MUON},
        "zero2": {"distributed__strategy": "zero2", "trainer__activation_checkpointing": "selective"},
        "fsdp": {"distributed__strategy": "fsdp", "trainer__precision": "bf16", **MUON},
        "tree": {"distributed__reduction": "tree"},
        "stages": {"distributed__pipeline_stages": 2, "trainer__batch_size": 8, **MUON},
    },
}
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


@pytest.mark.parametrize("ranks", RUNS)
def test_a_step_reads_no_values(ranks: int, text: Path, tmp_path: Path) -> None:
    for counts in run_ranks(ranks, _count_reads, text, RUNS[ranks], tmp_path=tmp_path):
        assert counts == dict.fromkeys(RUNS[ranks], (0, 1))


def _count_reads(text: Path, runs: dict[str, Options]) -> dict[str, tuple[int, int]]:
    """Returns the number of reads of the second step, and after the norm of its gradient has been read, too."""
    counts = {}
    for name, options in runs.items():
        argv = run_args(text.parent / name, text, **options)
        with open_trainer(*argv) as trainer:
            trainer.train_step()
            with CountReads() as reads:
                result = trainer.train_step()
                in_step = reads.count
                result.grad_norm.item()
            counts[name] = in_step, reads.count
    return counts
