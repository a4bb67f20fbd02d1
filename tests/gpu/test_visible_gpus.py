"""Tests train on the CPU, even on a machine with GPUs, except for `pytest -m gpu`."""

import os
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT, run_program, run_ranks

VISIBLE = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


def test_programs_that_tests_start_see_no_gpu(tmp_path: Path) -> None:
    assert run_program("-c", VISIBLE).stdout == "''\n"
    assert run_ranks(2, _visible_gpus, tmp_path=tmp_path) == [("", 0)] * 2


def _visible_gpus() -> tuple[str, int]:
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count()


def test_without_a_gpu_the_command_for_gpus_says_so_in_one_line() -> None:
    done = run_program("-m", "pytest", "-m", "gpu", cwd=ROOT, TEST_VISIBLE_GPUS="")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith(f"no test has run: PyTorch {torch.__version__}, ")
    assert "PyTorch sees no CUDA GPU" in line


@pytest.mark.slow
def test_the_tests_of_gpus_pass_on_the_cpu_in_place_of_two_gpus() -> None:
    files = ("tests/parallel/test_tree_reduction.py", "tests/gpu/test_on_gpus.py")
    selected = ("-m", "gpu", "-k", "(tree or fsdp) and not fp16")  # fp16 needs a GPU
    command = ("-m", "pytest", *selected, "-n", "0", "-q", "-p", "no:cacheprovider", *files)
    done = run_program(*command, cwd=ROOT, TEST_VISIBLE_GPUS="", TEST_GPU_COUNT="2")
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
