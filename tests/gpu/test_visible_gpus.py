"""Tests train on the CPU, also on a machine with GPUs."""

import os
from pathlib import Path

import torch
from helpers import run_program, run_ranks

COUNT = "import os, torch; print(os.environ['CUDA_VISIBLE_DEVICES'] + str(torch.cuda.device_count()))"


def test_programs_that_tests_start_see_no_gpu(tmp_path: Path) -> None:
    assert run_program("-c", COUNT).stdout == "0\n"
    assert run_ranks(2, _visible_gpus, tmp_path=tmp_path) == [("", 0)] * 2


def _visible_gpus() -> tuple[str, int]:
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count()
