"""Steps that are recorded as CUDA graphs have the bits of other steps, also after a resume."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from mingpt.config.conflicts import find_start_conflicts
from mingpt.config.parser import read_config
from mingpt.system import torch_versions
from tests.helpers import DEVICES, VISIBLE_GPUS, assert_equal_snapshots, loss_curve, run_program, run_ranks
from tests.parallel import graphs

NOT_RECORDED = {
    "sgd": "none (the optimizer, SGD, is not fused)",
    "activation checkpointing": "none (trainer.activation_checkpoin",
}
WARNINGS = {
    "a read": f"{graphs.__file__}, line ",
    "a random number": graphs.RANDOM_WARNING,
    "new buffers": graphs.REPLACED,
}


def train_captured(folder: Path) -> tuple[str, str]:
    """For `run_ranks`: calls `train_all`. Returns stdout and stderr."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        graphs.train_all(folder)
    return stdout.getvalue(), stderr.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_steps_have_the_bits_of_other_steps_also_after_a_resume(device: str, tmp_path: Path) -> None:
    """Changes that a graph does not survive, and faults, end in one warning and the bits of steps without graphs."""
    if device == "cpu":
        runs = graphs.RUNS | graphs.CPU_RUNS
        changed = graphs.CHANGED | graphs.FAULTS
        [(stdout, stderr)] = run_ranks(1, train_captured, tmp_path, tmp_path=tmp_path, timeout=400)
    else:
        runs = graphs.RUNS | graphs.GPU_RUNS
        changed = graphs.GPU_CHANGED
        done = run_program("-m", "tests.parallel.graphs", str(tmp_path), timeout=900, **VISIBLE_GPUS)
        stdout, stderr = done.stdout, done.stderr
        assert done.returncode == 0, stderr
    for name in [*runs, *changed]:
        one = tmp_path / f"{name}-graphs"
        if name in graphs.FAULTS:
            (tmp_path / f"{name}-plain").symlink_to(tmp_path / "faults-plain")
        for other in (tmp_path / f"{name}-plain", tmp_path / f"{name}-parts"):
            if other.exists():  # changed runs have no parts
                assert_equal_snapshots(one, other)
                assert loss_curve(one) == loss_curve(other), other
    recorded = [name for name in runs if name not in NOT_RECORDED]
    starts = 3  # with trainer.cuda_graphs: auto
    announced = stdout.count("CUDA graphs after the first steps (one GPU)")
    assert announced == starts * len(recorded) + len(changed) + 2
    for name, reason in NOT_RECORDED.items():
        assert stdout.count(reason) == starts * (name in runs)
    expected = [WARNINGS[name] for name in runs if name in WARNINGS for _ in range(starts)]
    expected += [warning for _, warning in changed.values()]
    found = [line for line in stderr.splitlines() if line.startswith("warning: ")]
    for line, warning in zip(found, expected, strict=True):
        assert line.startswith(f"warning: CUDA graphs can't be used, because {warning}"), stderr
        assert line.endswith("; training continues without them")
    refused, waits, differs = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert (
        refused == "error: trainer.cuda_graphs is true, must be auto or false, because the optimizer, SGD, is not fused"
    )
    problem = "error: trainer.cuda_graphs is true, but CUDA graphs can't be used, because"
    assert waits.startswith(f"{problem} {graphs.__file__}, line ")
    assert differs.startswith(f"{problem} {graphs.DIFFERS}")
    assert "Traceback" not in stderr


def test_what_else_ends_the_use_of_graphs(tmp_path: Path) -> None:
    """Kernels that add in varying order do not."""
    [done] = run_ranks(1, graphs.train_others, tmp_path, tmp_path=tmp_path)
    for name, (status, stdout, stderr) in done.items():
        *_, expected_status, expected = graphs.OTHERS[name]
        assert status == expected_status, (name, stderr)
        assert len(stderr.splitlines()) == (expected not in (None, graphs.LARGE)), (name, stderr)
        assert (expected or "") in stdout + stderr, (name, stderr)


def test_graphs_are_not_used_with_builds_of_pytorch_that_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    assert torch_versions.untested_with_cuda_graphs() is None
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1+cu130"))
    assert torch_versions.untested_with_cuda_graphs() == "PyTorch is 2.10.1+cu130, below 2.11"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert torch_versions.untested_with_cuda_graphs() == "PyTorch is for AMD GPUs"


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
