"""launch/*.sbatch on a real SLURM: a little cluster on this machine, with two nodes that are two daemons."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    ROOT,
    assert_equal_snapshots,
    clean_env,
    free_port,
    loss_curve,
    read_rows,
    run_args,
    run_ranks,
    train_main,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))), reason="SLURM is not installed"),
]

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2
"""  # a credential expires after 5 seconds instead of 120, for which a requeued job would have to wait.
PATIENCE = 90  # seconds for what takes ten


class Cluster:
    """SLURM's controller and nodes, and what is asked of them."""

    def __init__(self, folder: Path) -> None:
        self.env = clean_env(
            SLURM_CONF=str(folder / "slurm.conf"), PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        )

    def ask(self, *words: str) -> str:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60, env=self.env, cwd=ROOT, check=False)
        assert answer.returncode == 0, f"{' '.join(words)}: {answer.stderr}"
        return answer.stdout

    def submit(self, *words: str) -> str:
        """A batch script with its arguments; returns the job's number. Nodes are its own as long as it runs."""
        return self.ask("sbatch", "--parsable", "--exclusive", "--nodes=2", *words).strip()

    def facts(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job: JobState, Restarts, ExitCode and others."""
        return dict(word.split("=", 1) for word in self.ask("scontrol", "show", "job", job).split() if "=" in word)

    def back(self, job: str, restarts: int) -> None:
        """Waits until a job is back in the queue, so many times in all."""
        goal = {"JobState": "PENDING", "Restarts": str(restarts)}
        wait(lambda: goal.items() <= self.facts(job).items(), f"job {job} in the queue")

    def end(self, job: str) -> dict[str, str]:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        wait(lambda: self.facts(job)["JobState"] in over, f"job {job} at its end")
        return self.facts(job)


def wait(until: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE} s"
        time.sleep(0.05)


@contextmanager
def daemon(log: Path, *command: str, **env: str) -> Iterator[None]:
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=clean_env(**env), start_new_session=True) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    host, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(3)]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, user=getpass.getuser(), folder=folder, ports=ports))
    cluster = Cluster(folder)
    with ExitStack() as daemons:
        for name, *command in (
            ("slurmctld", "slurmctld", "-D", "-c"),
            ("node1", "slurmd", "-D", "-N", "node1"),
            ("node2", "slurmd", "-D", "-N", "node2"),
        ):
            daemons.enter_context(daemon(folder / f"{name}.log", *command, SLURM_CONF=str(config)))
        wait(lambda: cluster.ask("sinfo", "--noheader", "--format=%D %t") == "2 idle\n", "two nodes")
        yield cluster
        cluster.ask("scancel", f"--user={getpass.getuser()}")
        wait(lambda: not cluster.ask("squeue", "--noheader"), "no job is left")


@pytest.mark.parametrize("script", ["slurm.sbatch", "srun.sbatch"])
def test_warned_requeued_and_preempted_it_ends_in_the_same_bits(
    script: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    knobs: dict[str, Any] = {"trainer__max_steps": 600, "trainer__save_every": 10**6, "trainer__eval_every": 500}
    whole, run, out = tmp_path / "whole", tmp_path / "run", tmp_path / "out.txt"
    assert run_ranks(2, train_main, *run_args(whole, text, **knobs), tmp_path=tmp_path) == [0, 0]

    options = ("--cpus-per-task=1", f"--output={out}", f"launch/{script}")
    job = cluster.submit(*options, *run_args(run, text, **knobs))
    disturbances = (
        ("scancel", "--signal=USR1", job),  # what --signal=USR1@120 does
        ("scontrol", "requeue", job),
        ("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"),
    )
    for restarts, words in enumerate(disturbances, start=1):
        wait(lambda: trains(run, starts=restarts), f"start {restarts}")  # noqa: B023
        cluster.ask(*words)
        cluster.back(job, restarts)
    ended = cluster.end(job)

    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "3"), out.read_text()
    assert {row["world_size"] for row in read_rows(run)} == {2}
    stops = read_rows(run, "stop")
    assert [row["signal"] for row in stops] == ["SIGUSR1", "SIGTERM", "SIGTERM", None]
    assert [row["step"] for row in read_rows(run, "start")] == [0, *(row["step"] for row in stops[:-1])], (
        "nothing is lost"
    )
    assert_equal_snapshots(whole, run)
    assert loss_curve(whole) == loss_curve(run)


def trains(run_dir: Path, starts: int) -> bool:
    """Whether a run has made 20 steps since so many starts."""
    if not (run_dir / "metrics.jsonl").exists():
        return False
    started, steps = read_rows(run_dir, "start"), read_rows(run_dir)
    return len(started) == starts and bool(steps) and steps[-1]["step"] >= started[-1]["step"] + 20


def test_preempted_before_the_first_step_it_is_requeued(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    options = ("--cpus-per-task=1", f"--output={tmp_path}/out.txt", "launch/slurm.sbatch")
    job = cluster.submit(*options, *run_args(tmp_path / "run", text))
    wait(lambda: f"{job}.0" in cluster.ask("squeue", "--steps", "--noheader", "--format=%i"), "torchrun")
    cluster.submit("--partition=high", "--output=/dev/null", "--wrap=true")
    cluster.back(job, restarts=1)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    cluster.ask("scancel", job)


def test_a_mistake_is_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    job = cluster.submit("--cpus-per-task=1", f"--output={out}", "launch/slurm.sbatch", "--trainer.max_step", "3")
    ended = cluster.end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert out.read_text().count("error: ") == 1


def test_a_crash_is_tried_again_for_as_long_as_the_run_gets_further(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """A loss that is not finite, always at the same step."""
    argv = run_args(tmp_path / "run", text, optimizer__learning_rate=1e30, trainer__save_every=1000)
    job = cluster.submit("--cpus-per-task=1", f"--output={tmp_path}/out.txt", "launch/slurm.sbatch", *argv)
    cluster.back(job, restarts=1)
    ended = cluster.end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "1")
