"""Other ranks name a rank that fails, and after restarts the run has the same bits."""

from pathlib import Path

import pytest

from tests.helpers import (
    SLOW_ON_CPU,
    TORCHRUN,
    VISIBLE_GPUS,
    assert_equal_snapshots,
    loss_curve,
    ranks_on,
    read_rows,
    run_args,
    run_on,
    run_program,
)

# torchrun names a process that was killed. After SIGSTOP, it waits 30 s for the stopped process.
MESSAGES = {"SIGKILL": "Signal 9 (SIGKILL) received", "SIGSTOP": "error: rank 1: dead", "OOM": "error: out of memory: "}


@pytest.mark.parametrize("device", SLOW_ON_CPU)
def test_a_failed_rank_is_named_and_restarts_change_no_bit(device: str, text: Path, tmp_path: Path) -> None:
    """The run fails once by each event in new processes, and then once in processes that torchrun starts again."""
    ranks = ranks_on(device, 2)
    options = {
        "trainer__deterministic": True,
        "trainer__save_overhead": None,  # only trainer.save_every asks for snapshots
        "trainer__eval_every": 100,
        "distributed__timeout_seconds": 15,
    }
    whole, failed = tmp_path / "whole", tmp_path / "failed"
    run_on(device, ranks, [run_args(whole, text, **options)], tmp_path)

    launcher = (*TORCHRUN, f"--nproc_per_node={ranks}")
    env = VISIBLE_GPUS if device == "cuda" else {}
    events = [*MESSAGES] if ranks == 2 else ["OOM"]
    for event in events:
        argv = ("-m", "tests.gpu.injected", event, *run_args(failed, text, **options))
        done = run_program(*launcher, *argv, **env)
        assert done.returncode == 1
        assert MESSAGES[event] in done.stderr
    argv = ("-m", "tests.gpu.injected", "SIGKILL", *run_args(failed, text, **options))
    done = run_program(*launcher, "--max_restarts=1", *argv, **env)
    assert done.returncode == 0, done.stderr

    assert [row["step"] for row in read_rows(failed, "start")] == [0] + [6] * (len(events) + 1)
    assert [row["restart_count"] for row in read_rows(failed)] == [0] * 6 + [1] * 6
    assert_equal_snapshots(whole, failed)
    assert loss_curve(whole) == loss_curve(failed)
