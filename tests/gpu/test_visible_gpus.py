"""Tests train on the CPU, also on a machine with GPUs."""

import os
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_program, run_ranks

from tests.gpu.pretended_gpu import pretended_gpu_env

COUNT = "import torch; print(torch.cuda.device_count(), torch.accelerator.current_accelerator(check_available=True))"


def test_programs_that_tests_start_see_no_gpu(library: Path, tmp_path: Path) -> None:
    """They do see one if a test asks for it."""
    env = pretended_gpu_env(library, "1,3")
    assert run_program("-c", COUNT, **env).stdout == "2 cuda\n"
    del env["CUDA_VISIBLE_DEVICES"]
    assert run_program("-c", COUNT, **env).stdout == "0 None\n"
    assert run_ranks(2, _visible_gpus, tmp_path=tmp_path) == [("", 0)] * 2


def _visible_gpus() -> tuple[str, int]:
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count()


@pytest.mark.slow
def test_tests_of_several_ranks_pass_where_a_gpu_is_visible(library: Path) -> None:
    """They would use nccl."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/distributed/test_process_group.py")
    done = run_program(*command, cwd=ROOT, **pretended_gpu_env(library))
    assert done.returncode == 0, done.stdout
