"""When a rank fails, the others name it and exit in time. When the launcher is killed, no process is left."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from mingpt.distributed import process_group
from mingpt.errors import UserError
from tests.helpers import (
    call_before,
    free_port,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_main,
    wait_for_step,
    wait_until,
    worker_pids,
)
from trainer import Trainer

TIMEOUT = 4


@pytest.mark.parametrize(
    ("lost_rank", "signal_name"),
    [
        (2, "SIGKILL"),
        pytest.param(0, "SIGKILL", marks=pytest.mark.slow),  # rank 0 hosts the store
        pytest.param(0, "SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_name_the_lost_one_in_time(lost_rank: int, signal_name: str, text: Path, tmp_path: Path) -> None:
    init_method = f"tcp://localhost:{free_port()}"
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1_000_000, distributed__timeout_seconds=TIMEOUT)
    results = run_ranks(
        3, _lose_a_rank, init_method, lost_rank, signal_name, argv, lost_rank=lost_rank, tmp_path=tmp_path
    )
    assert results.pop(lost_rank) is None
    for status, err, seconds in results:
        assert status == 1
        assert seconds < TIMEOUT + 9
        assert err.count("error: ") == 1, err
        assert f"error: rank {lost_rank}" in err, err
    assert newest_snapshot(tmp_path / "run")["step"] >= 3


def _lose_a_rank(init_method: str, lost_rank: int, signal_name: str, argv: list[str]) -> tuple[int, str, float]:
    """One rank sends itself a signal before step 6. Returns status, stderr and the seconds since then."""
    started = []

    def send_signal(trainer: Trainer) -> None:
        if trainer.progress.step == 5:
            trainer.snapshots.newest_write.result()  # the test expects the snapshot of step 3
            started.append(time.monotonic())
            if trainer.context.rank == lost_rank:
                os.kill(os.getpid(), getattr(signal, signal_name))

    call_before(Trainer, "train_step", send_signal)
    process_group.ANSWER_SECONDS = 1.5
    os.environ["TEST_INIT_METHOD"] = init_method
    status, _, err = run_captured(*argv)
    return status, err, time.monotonic() - started[0]


def test_the_exception_of_a_rank_is_reported_by_the_others(text: Path, tmp_path: Path) -> None:
    errors, argv = {1: ZeroDivisionError("on purpose")}, run_args(tmp_path / "run", text)
    results = run_ranks(4, _raise_errors, errors, [{}] * 4, argv, tmp_path=tmp_path)
    assert [status for status, _ in results] == [1] * 4
    patterns = [r"error: rank 1 failed: ZeroDivisionError: on purpose; the same command resumes\n"] * 3
    patterns.insert(1, r"(?s).*\nZeroDivisionError: on purpose\n")
    for (_, err), pattern in zip(results, patterns, strict=True):
        assert re.fullmatch(pattern, err)


@pytest.mark.parametrize("mistaken", [[1], [0, 1, 2]])
def test_a_mistake_is_reported_once_and_with_the_rank_if_only_one_rank_finds_it(
    mistaken: list[int], text: Path, tmp_path: Path
) -> None:
    envs = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"} for rank in range(3)]
    errors, argv = dict.fromkeys(mistaken, UserError("no more paper")), run_args(tmp_path / "run", text)
    results = run_ranks(3, _raise_errors, errors, envs, argv, tmp_path=tmp_path)
    assert [status for status, _ in results] == [2 if rank in mistaken else 1 for rank in range(3)]
    message = r"rank 1 failed: UserError: no more paper; the same command resumes"
    if mistaken != [1]:
        message = "no more paper"
        assert results[0][1] != ""
    assert re.fullmatch(f"error: {message}\n", "".join(err for _, err in results))


def _raise_errors(errors: dict[int, Exception], envs: list[dict[str, str]], argv: list[str]) -> tuple[int, str]:
    """Sets an environment for each rank. The second step of some ranks raises an error."""
    rank = int(os.environ["RANK"])
    os.environ.update(envs[rank])

    def raise_error(trainer: Trainer) -> None:
        if rank in errors and trainer.progress.step == 1:
            # With nccl, it would wait for the other ranks (pytorch#196968).
            dist.destroy_process_group = lambda: time.sleep(1000)
            raise errors[rank]

    call_before(Trainer, "train_step", raise_error)
    status, _, err = run_captured(*argv)
    return status, err


@pytest.mark.slow
def test_workers_save_and_exit_when_torchrun_is_killed(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = run_args(run_dir, text, trainer__max_steps=1_000_000, trainer__save_every=100_000)
    with start_main(argv, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2") as agent:
        wait_for_step(run_dir, 5)
        workers = worker_pids(agent.pid)
        agent.kill()
        wait_until(lambda: not any(map(psutil.pid_exists, workers)), "the workers have ended", timeout=20)
    assert newest_snapshot(run_dir)["step"] == read_rows(run_dir, "stop")[-1]["step"] == read_rows(run_dir)[-1]["step"]
