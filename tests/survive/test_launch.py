"""The start of a run with distributed.survive, and what ends it."""

import json
import os
import pickle
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from helpers import ROOT, TORCHRUN, newest_snapshot, run_args, run_main, run_program, wait_until

from mingpt.survive.membership import MAX_VIEWS
from tests.faults.runs import Run

SURVIVE = {"distributed__survive": True, "distributed__reduction": "tree"}


FAILS_AT_STEP_3 = """
import os
import sys

import main
import trainer
from mingpt.program import exit_process, run_program


def train_step(self, original=trainer.Trainer.train_step):
    if self.progress.step == 3 and os.environ["RANK"] in os.environ["FAILING_RANKS"]:
        raise ZeroDivisionError("at step 3")
    return original(self)


trainer.Trainer.train_step = train_step
exit_process(run_program(main.main, sys.argv[1:]))
"""


def endless_run(text: Path, tmp_path: Path, program: Path = ROOT / "main.py", **options: Any) -> Run:
    """A run that ends by a signal only."""
    return Run(tmp_path / "run", run_args(tmp_path / "run", text, trainer__max_steps=10**6, **options), program)


def trainers(run: Run) -> list[int]:
    """Process ids of the trainers by rank, without their supervisors."""
    found = {}
    for pid in run.pids():
        env = Path(f"/proc/{pid}/environ").read_text().split("\0")
        if any(entry.startswith("MINGPT_SUPERVISOR_TOKEN=") for entry in env):
            found[pid] = next(entry for entry in env if entry.startswith("RANK="))
    return sorted(found, key=found.__getitem__)


def assert_logged_once(run: Run) -> None:
    steps = [row["step"] for row in run.rows("train")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_process_without_a_launcher_starts_again_from_its_newest_snapshot(text: Path, tmp_path: Path) -> None:
    """There is nobody to get the state from. Its parent has ignored SIGCHLD and closed stdin."""
    with endless_run(text, tmp_path, **SURVIVE) as run:
        run.start(prefix=["bash", "-c", 'trap "" CHLD; exec "$@" <&-', "-"])
        run.wait(lambda: bool(run.rows("snapshot")), "a snapshot")
        [trainer] = trainers(run)
        os.kill(trainer, signal.SIGKILL)
        run.wait(lambda: len(run.rows("start")) == 2, "the second start")
        run.processes[0].terminate()
        assert run.finish() == [143]
        assert "its process was ended by SIGKILL: starting another" in run.output()
        assert_logged_once(run)
        wait_until(lambda: not run.pids(), "the end of the store")


@pytest.mark.slow
def test_ranks_started_by_hand_meet_at_a_store_that_outlives_rank_0(text: Path, tmp_path: Path) -> None:
    with endless_run(text, tmp_path, **SURVIVE) as run:
        run.start_by_hand(2)
        run.wait_for_step(1)
        os.kill(trainers(run)[0], signal.SIGKILL)
        run.wait(lambda: has_returned(run, 0), "the return of rank 0")
        os.killpg(run.processes[0].pid, signal.SIGTERM)  # as by Ctrl-C on a terminal: also to the store's process
        assert run.finish() == [143, 143]
        assert len(run.rows("start")) == 1
        wait_until(lambda: not run.pids(), "the end of the store")


def has_returned(run: Run, rank: int) -> bool:
    return any(member.startswith(f"{rank}@") for row in run.rows("view") for member in row["joined"])


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


def test_a_session_is_not_replaced_by_a_supervisor(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(os, "execv", lambda *args: pytest.fail("the session is replaced"))
    assert run_main(run_args(tmp_path / "run", text, **SURVIVE)) == 2
    assert "distributed.survive is true, which replaces this process: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class Exploit:
    """Creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def listening_addresses(run: Run) -> set[str]:
    """At which the processes of a run listen."""
    found = [connection for pid in run.pids() for connection in psutil.Process(pid).net_connections()]
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def test_a_client_of_the_store_runs_no_code_in_a_trainer(text: Path, tmp_path: Path) -> None:
    """It writes the next view. The store listens on the loopback, on one machine."""
    with endless_run(text, tmp_path, **SURVIVE) as run:
        run.start_by_hand(2)
        run.wait_for_step(1)
        assert not listening_addresses(run) & {"0.0.0.0", "::"}
        port = int(run.argv[-1].rpartition(":")[2])
        root = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        token = root.get("token/0").decode()
        store = dist.PrefixStore(root.get(f"offer/{token}").decode(), root)
        view = run.rows("view")[-1]["view"]
        store.set(f"view/{view + 1}", pickle.dumps(Exploit(tmp_path / "exploited")))
        store.set(f"ended/{view}", json.dumps(["an attack", []]))
        run.wait(lambda: "UnicodeDecodeError" in run.log.read_text(), "a trainer that reads the view")
    assert not (tmp_path / "exploited").exists()


@pytest.mark.slow
def test_an_error_in_one_trainer_ends_no_run(text: Path, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS_AT_STEP_3)
    with endless_run(text, tmp_path, program, **SURVIVE) as run:
        run.start_torchrun(3, FAILING_RANKS="0")
        run.wait(lambda: has_returned(run, 0), "the return of rank 0")
        run.wait_for_step(run.step() + 3)
        run.processes[0].terminate()
        run.finish()
    assert "ZeroDivisionError: at step 3" in run.log.read_text()
    assert len(run.rows("start")) == 1
    assert_logged_once(run)


@pytest.mark.slow
def test_the_same_error_in_all_trainers_ends_the_run(text: Path, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS_AT_STEP_3)
    with endless_run(text, tmp_path, program, **SURVIVE) as run:
        run.start_torchrun(2, FAILING_RANKS="01")
        assert run.finish() == [1]
    assert f"no step was finished in {MAX_VIEWS} views" in run.log.read_text()
    assert [row["step"] for row in run.rows("train")] == [1, 2, 3]


@pytest.mark.parametrize("changes", [{}, pytest.param(SURVIVE, marks=pytest.mark.slow)], ids=["", "survive"])
def test_the_loss_of_by_hand_py_stops_its_ranks(changes: dict[str, Any], text: Path, tmp_path: Path) -> None:
    with endless_run(text, tmp_path, **changes) as run:
        run.argv = ["2", *run.argv]
        run.program = ROOT / "launch/by_hand.py"
        run.start(TMPDIR=str(tmp_path))
        run.wait_for_step(1)
        run.processes[0].kill()
        wait_until(lambda: not run.pids(), "the end of all ranks", timeout=20)
    assert newest_snapshot(run.run_dir)["step"] == run.step()
    assert "Traceback" not in run.log.read_text()
