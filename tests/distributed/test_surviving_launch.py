"""The start of a run with distributed.survive, and what ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    TORCHRUN,
    clean_env,
    find_processes,
    free_port,
    read_rows,
    run_args,
    run_program,
    wait_until,
)

SURVIVE = {"distributed__survive": True, "distributed__reduction": "tree"}


def trainers(variable: str) -> list[int]:
    """Process ids of the trainers, without their supervisors."""
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in find_processes(variable)}
    return [pid for pid, env in environments.items() if b"\0MINGPT_SUPERVISOR_PID=" in env]


@pytest.mark.slow
def test_a_process_without_a_launcher_starts_again_from_its_newest_snapshot(text: Path, tmp_path: Path) -> None:
    """There is nobody to get the state from."""
    argv = run_args(tmp_path / "run", text, trainer__max_steps=10**6, **SURVIVE)
    command = [sys.executable, str(ROOT / "main.py"), *argv]
    with subprocess.Popen(command, env=clean_env(SURVIVE_TEST=str(tmp_path)), stderr=subprocess.PIPE, text=True) as run:
        file = tmp_path / "run/metrics.jsonl"
        wait_until(lambda: file.exists() and '"snapshot"' in file.read_text(), "a snapshot")
        [trainer] = trainers(f"SURVIVE_TEST={tmp_path}")
        subprocess.run(["kill", "-KILL", str(trainer)], check=True)
        wait_until(lambda: file.read_text().count('"start"') == 2, "the second start")
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=60)
    assert run.returncode == 143
    assert "its process was ended by SIGKILL: starting another" in stderr
    steps = [row["step"] for row in read_rows(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    wait_until(lambda: not find_processes(f"SURVIVE_TEST={tmp_path}"), "the end of the store")


@pytest.mark.slow
def test_ranks_started_by_hand_meet_at_a_store_that_outlives_rank_0(text: Path, tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    argv = run_args(tmp_path / "run", text, trainer__max_steps=10**6, distributed__init_method=address, **SURVIVE)
    command, variable = [sys.executable, str(ROOT / "main.py"), *argv], f"SURVIVE_TEST={tmp_path}"
    envs = [clean_env(RANK=str(rank), WORLD_SIZE="2", SURVIVE_TEST=str(tmp_path)) for rank in range(2)]
    runs = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True) for env in envs]
    file = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: file.exists() and '"train"' in file.read_text(), "the first step")
    [first] = [pid for pid in trainers(variable) if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    subprocess.run(["kill", "-KILL", str(first)], check=True)
    wait_until(lambda: '"joined": ["0@' in file.read_text(), "the return of rank 0")
    os.killpg(runs[0].pid, signal.SIGTERM)  # as a terminal does with Ctrl-C: also to the process with the store
    assert [run.wait(60) for run in runs] == [143, 143]
    assert file.read_text().count('"start"') == 1
    wait_until(lambda: not find_processes(variable), "the end of the store")


@pytest.mark.slow
def test_bad_input_ends_the_run_with_one_message(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__batch_size=2, **SURVIVE)
    run = run_program(*TORCHRUN, "--nproc_per_node=2", "main.py", *argv)
    assert run.returncode == 1
    [error] = [line for line in run.stderr.splitlines() if line.startswith(("error:", "warning:"))]
    assert error.startswith("error: trainer.batch_size / trainer.micro_batch_size is 2 / 2, fewer micro-batches than ")
    assert 'main.py", line' not in run.stderr
