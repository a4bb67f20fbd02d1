"""distributed.survive on GPUs, whose tensors gloo exchanges through host memory, and on pretended ones."""

from pathlib import Path
from typing import Any

import pytest
from helpers import ON_GPUS, TORCHRUN, VISIBLE_GPUS, newest_snapshot, ranks_on, read_rows, run_args, run_program

from tests.faults.runs import assert_same_run
from tests.faults.test_survive import OPTIONS, run_with_orders
from tests.gpu.pretended_gpu import NAME, compile_library, pretended_gpu_env, unsupported_reason

PLACES = [
    ("collective", 1, "SIGKILL", 3),
    ("in collective", 1, "SIGKILL", 3),
    ("evaluating", 0, "SIGKILL", 2),
    ("copying", None, "SIGKILL", 1),
    ("gathered", 1, "SIGKILL", 3),
    ("saving", 0, "SIGKILL later", 2),
    ("gathered", 1, "SIGSTOP", 3),
]
# The pretended GPU has no kernel for RMSNorm, and no generator for samples.
CHANGES: dict[str, Any] = {
    "model__architecture": "gpt2",
    "trainer__sample_every": None,
    "trainer__deterministic": True,
}


@pytest.mark.parametrize("device", [pytest.param("pretended", marks=pytest.mark.slow), ON_GPUS])
def test_a_rank_that_is_lost_on_gpus_changes_no_bit(device: str, text: Path, tmp_path: Path) -> None:
    env, ranks = VISIBLE_GPUS, 3
    if device == "cuda":
        ranks = ranks_on("cuda", 3, at_least=2)
    elif reason := unsupported_reason():
        pytest.skip(reason)
    else:
        env = pretended_gpu_env(compile_library(tmp_path, has_memory=True), "0,1,2")
    orders = [(place, rank, name, min(ranks, members)) for place, rank, name, members in PLACES]
    run = run_with_orders(orders, ranks, text, tmp_path, env, **CHANGES)

    step = newest_snapshot(run.run_dir)["step"]
    options = OPTIONS | CHANGES | {"trainer__max_steps": step}
    done = run_program("main.py", *run_args(tmp_path / "undisturbed", text, **options), **env)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "undisturbed", run.run_dir)
    rows = read_rows(run.run_dir)
    assert all("memory" in row for row in rows)
    if device == "pretended":
        assert all("mfu" in row for row in rows)
        assert {row["hardware"] for row in read_rows(run.run_dir, "start")} == {NAME}

        argv = run_args(tmp_path / "too_many", text, distributed__survive=True, **OPTIONS | CHANGES)
        one_gpu = env | {"CUDA_VISIBLE_DEVICES": "0"}
        done = run_program(*TORCHRUN, "--nproc_per_node=2", "main.py", *argv, **one_gpu)
        assert done.returncode == 1
        assert "other ranks have taken the 1 GPU(s) of " in done.stderr
