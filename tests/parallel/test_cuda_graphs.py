"""Steps that are recorded as CUDA graphs have the bits of other steps, also after a resume."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from mingpt.config.conflicts import find_start_conflicts
from mingpt.config.parser import read_config
from tests.helpers import DEVICES, VISIBLE_GPUS, assert_equal_snapshots, loss_curve, run_program, run_ranks
from tests.parallel.graphs import GPU_RUNS, RUNS, train_all

NOT_RECORDED = {
    "sgd": "none (the optimizer, SGD, is not fused)",
    "activation checkpointing": "none (trainer.activation_checkpoin",
}
FILE = Path(__file__).with_name("graphs.py")
WARNINGS = {
    "a read": f"{FILE}, line ",
    "a random number": "it draws random numbers on the CPU",
    "new buffers": "MLP replaces its buffer average",
}


def train_captured(folder: Path) -> tuple[str, str]:
    """For `run_ranks`: calls `train_all`. Returns stdout and stderr."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        train_all(folder)
    return stdout.getvalue(), stderr.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_steps_have_the_bits_of_other_steps_also_after_a_resume(device: str, tmp_path: Path) -> None:
    runs = RUNS
    if device == "cpu":
        [(stdout, stderr)] = run_ranks(1, train_captured, tmp_path, tmp_path=tmp_path)
    else:
        runs = RUNS | GPU_RUNS
        done = run_program("-m", "tests.parallel.graphs", str(tmp_path), **VISIBLE_GPUS)
        stdout, stderr = done.stdout, done.stderr
        assert done.returncode == 0, stderr
    for name in runs:
        graphs = tmp_path / f"{name}-graphs"
        for other in (tmp_path / f"{name}-plain", tmp_path / f"{name}-parts"):
            assert_equal_snapshots(graphs, other)
            assert loss_curve(graphs) == loss_curve(other), other
    recorded = [name for name in runs if name not in NOT_RECORDED]
    starts = 3  # with trainer.cuda_graphs: auto
    assert stdout.count("CUDA graphs after the first steps (one GPU)") == starts * len(recorded) + 1
    for name, reason in NOT_RECORDED.items():
        assert stdout.count(reason) == starts * (name in runs)
    for name, warning in WARNINGS.items():
        assert stderr.count(f"warning: a step can't be recorded as CUDA graphs, because {warning}") == starts * (
            name in runs
        ), stderr
    assert f"error: trainer.cuda_graphs is true, but a step can't be recorded as CUDA graphs, because {FILE}" in stderr
    assert "error: trainer.cuda_graphs is true, must be auto or false, because the optimizer, SGD, is not" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("options", "world_size", "device", "reason"),
    [
        ("", 1, "cpu", "the device is cpu"),
        ("", 2, "cuda", "there are 2 processes"),
        ("--distributed.strategy fsdp", 1, "cuda", "distributed.strategy is fsdp"),
        ("--distributed.reduction tree --trainer.micro_batch_size 3", 1, "cuda", "distributed.reduction is tree"),
        ("--trainer.activation_checkpointing full", 1, "cuda", "trainer.activation_checkpointing is full"),
    ],
)
def test_graphs_are_refused_if_required_where_auto_does_without(
    options: str, world_size: int, device: str, reason: str
) -> None:
    def conflicts(value: str) -> list[str]:
        argv = [*options.split(), "--trainer.cuda_graphs", value, "--trainer.deterministic", "true"]
        config = read_config(argv)
        return list(find_start_conflicts(config, world_size, device))

    assert conflicts("true") == [f"trainer.cuda_graphs is true, must be auto or false, because {reason}"]
    assert conflicts("auto") == conflicts("false") == []
