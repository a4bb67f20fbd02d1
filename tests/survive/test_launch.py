"""The start of a run with distributed.survive, and what ends it."""

import json
import os
import pickle
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from helpers import (
    ROOT,
    TORCHRUN,
    clean_env,
    find_processes,
    free_port,
    kill_processes,
    newest_snapshot,
    read_rows,
    run_args,
    run_program,
    wait_for_step,
    wait_until,
)

SURVIVE = {"distributed__survive": True, "distributed__reduction": "tree"}


FAILS_AT_STEP_3 = """
import os

import main
import trainer


def train_step(self, original=trainer.Trainer.train_step):
    if self.step == 3 and os.environ["RANK"] in os.environ["FAILING_RANKS"]:
        raise ZeroDivisionError("at step 3")
    return original(self)


trainer.Trainer.train_step = train_step
main.main()
"""


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
    few = "trainer.batch_size / trainer.micro_batch_size is 2 / 2, fewer micro-batches than "
    inputs = [({"trainer__batch_size": 2}, few), ({"optimizer__learning_rate": 1e30}, "step 2: the loss is not finite")]
    for changes, message in inputs:
        argv = run_args(tmp_path / "run", text, **changes, **SURVIVE)
        run = run_program(*TORCHRUN, "--nproc_per_node=2", "main.py", *argv)
        assert run.returncode == 1
        [error] = [line for line in run.stderr.splitlines() if line.startswith(("error:", "warning:"))]
        assert error.startswith(f"error: {message}")
        assert 'main.py", line' not in run.stderr


class Exploit:
    """Creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def listening_addresses(variable: str) -> set[str]:
    """At which the processes listen that have this variable."""
    found = [connection for pid in find_processes(variable) for connection in psutil.Process(pid).net_connections()]
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def test_a_client_of_the_store_runs_no_code_in_a_trainer(text: Path, tmp_path: Path) -> None:
    """It takes the place of ranks in objects that they exchange. The store listens on the loopback, on one machine."""
    port, variable = free_port(), f"SURVIVE_TEST={tmp_path}"
    address = f"tcp://127.0.0.1:{port}"
    argv = run_args(tmp_path / "run", text, trainer__max_steps=10**6, distributed__init_method=address, **SURVIVE)
    command = [sys.executable, str(ROOT / "main.py"), *argv]
    runs = []
    try:
        for rank in range(2):
            env = clean_env(RANK=str(rank), WORLD_SIZE="2", SURVIVE_TEST=str(tmp_path))
            with (tmp_path / f"log-{rank}").open("w") as log:
                runs.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
        wait_for_step(tmp_path / "run", 1)
        assert not listening_addresses(variable) & {"0.0.0.0", "::"}
        root = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        prefix = root.get("offer").decode().split()[0]
        store = dist.PrefixStore(prefix, root)
        malicious = pickle.dumps(Exploit(tmp_path / "exploited"))
        for view in range(2, 32):
            for rank in range(2):
                store.set(f"object/{view}/1/{rank}", malicious)
        logs: list[str] = []
        for view in range(1, 31):
            wait_until(lambda view=view: store.check([f"view/{view}"]), f"view {view}")
            store.compare_set(f"ended/{view}", "", json.dumps(["an attack", []]))
            wait_for_step(tmp_path / "run", read_rows(tmp_path / "run")[-1]["step"] + 3)
            logs = [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]
            if any("what is no plain data" in log for log in logs):  # read before the rank's own object replaced it
                break
    finally:
        kill_processes(variable)
        for run in runs:
            run.wait()
    assert not (tmp_path / "exploited").exists()
    assert any("what is no plain data" in log for log in logs), logs


def test_an_error_in_one_trainer_ends_no_run(text: Path, tmp_path: Path) -> None:
    program, file = tmp_path / "fails.py", tmp_path / "run/metrics.jsonl"
    program.write_text(FAILS_AT_STEP_3)
    argv = run_args(tmp_path / "run", text, trainer__max_steps=10**6, **SURVIVE)
    command = [sys.executable, *TORCHRUN, "--nproc_per_node=3", str(program), *argv]
    env = clean_env(FAILING_RANKS="0")
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        wait_until(lambda: file.exists() and '"joined": ["0@' in file.read_text(), "the return of rank 0")
        wait_for_step(tmp_path / "run", read_rows(tmp_path / "run")[-1]["step"] + 3)
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=60)
    assert "ZeroDivisionError: at step 3" in stderr
    assert file.read_text().count('"start"') == 1
    steps = [row["step"] for row in read_rows(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_the_same_error_in_all_trainers_ends_the_run(text: Path, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS_AT_STEP_3)
    argv = run_args(tmp_path / "run", text, trainer__max_steps=10**6, **SURVIVE)
    run = run_program(*TORCHRUN, "--nproc_per_node=2", str(program), *argv, FAILING_RANKS="01")
    assert run.returncode == 1
    assert run.stderr.count("ZeroDivisionError: at step 3") >= 2
    assert "starting another" not in run.stderr
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("changes", [{}, SURVIVE], ids=["", "survive"])
def test_the_loss_of_by_hand_py_stops_its_ranks(changes: dict[str, Any], text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=10**6, **changes)
    command = [sys.executable, str(ROOT / "launch/by_hand.py"), "2", *argv]
    variable = f"SURVIVE_TEST={tmp_path}"
    env = clean_env(SURVIVE_TEST=str(tmp_path), TMPDIR=str(tmp_path))
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_for_step(tmp_path / "run", 1)
            launcher.kill()
            wait_until(lambda: not find_processes(variable), "the end of all ranks", timeout=20)
        finally:
            kill_processes(variable)
        _, stderr = launcher.communicate()
    assert not stderr
    assert newest_snapshot(tmp_path / "run")["step"] == read_rows(tmp_path / "run")[-1]["step"]
