"""Memory per rank: what a step measures, and a step that runs out of memory."""

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mingpt.program import run_program
from tests.helpers import run_args, run_captured, run_ranks
from trainer import Trainer


def test_a_step_that_runs_out_of_memory_is_one_message(text: Path, tmp_path: Path) -> None:
    options = {"model__n_embd": 64, "trainer__batch_size": 4096, "trainer__micro_batch_size": None}
    argv = run_args(tmp_path / "run", text, **options)
    [(status, _, err)] = run_ranks(1, _limit_memory, argv, tmp_path=tmp_path)
    assert status == 2
    assert err.startswith("error: out of memory: lower trainer.micro_batch_size, ")
    assert "PyTorch's message: [enforce fail at alloc_cpu.cpp" in err
    for part in ("DefaultCPUAllocator: can't allocate memory: you tried", "trainer.micro_batch_size", "fsdp"):
        assert part in err
    assert "set trainer.activation_checkpointing to full" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: out of memory\nmore", "error: out of memory: lower trainer.micro_batch_size, "),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "error: out of memory: lower "),
    ],
)
def test_errors_of_cuda_that_name_no_cause_are_one_message(
    message: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are of type torch.AcceleratorError or RuntimeError. https://github.com/pytorch/pytorch/issues/175253"""

    def fail(argv: Sequence[str]) -> None:
        raise RuntimeError(message)

    assert run_program(fail, []) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(expected)
    assert len(stderr.splitlines()) == 1


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
