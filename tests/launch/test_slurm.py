"""launch/*.sbatch on a real SLURM cluster of two daemons on this machine."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import assert_same_run
from tests.helpers import ROOT, clean_env, free_port, read_rows, run_args, train_run, wait_until, write_text

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
"""  # cred_expire: a requeued job waits until its credential has expired, by default 120 seconds
TIMEOUT = 90  # seconds


class Cluster:
    """Commands to SLURM's controller."""

    def __init__(self, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = clean_env(SLURM_CONF=str(folder / "slurm.conf"), PATH=path)

    def run(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.env, cwd=ROOT, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, *args: str) -> str:
        """Submits a batch script with its arguments to both nodes. Returns the job's number."""
        return self.run("sbatch", "--parsable", "--exclusive", "--nodes=2", "--cpus-per-task=1", *args).strip()

    def preempt(self) -> None:
        self.submit("--partition=high", "--output=/dev/null", "--wrap=true")

    def job(self, job: str) -> dict[str, str]:
        """JobState, Restarts, ExitCode and other fields of a job."""
        return dict(word.split("=", 1) for word in self.run("scontrol", "show", "job", job).split() if "=" in word)

    def wait_for_requeue(self, job: str, restarts: int) -> None:
        expected = {"JobState": "PENDING", "Restarts": str(restarts)}
        wait_until(lambda: expected.items() <= self.job(job).items(), f"job {job} is in the queue", TIMEOUT)

    def wait_for_end(self, job: str) -> dict[str, str]:
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        wait_until(lambda: self.job(job)["JobState"] in states, f"job {job} has ended", TIMEOUT)
        return self.job(job)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    host, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, user=getpass.getuser(), folder=folder, ports=ports))
    cluster = Cluster(folder)
    with ExitStack() as daemons:
        for command in ("slurmctld -D -c", "slurmd -D -N node1", "slurmd -D -N node2"):
            log = daemons.enter_context((folder / f"{command}.log").open("w"))
            process = subprocess.Popen(command.split(), stdout=log, stderr=log, env=cluster.env, start_new_session=True)
            daemons.enter_context(process)
            daemons.callback(process.terminate)
        wait_until(
            lambda: cluster.run("sinfo", "--noheader", "--format=%D %t") == "2 idle\n", "two nodes are idle", TIMEOUT
        )
        yield cluster
        cluster.run("scancel", f"--user={getpass.getuser()}")
        wait_until(lambda: not cluster.run("squeue", "--noheader"), "the queue is empty", TIMEOUT)


OPTIONS: dict[str, Any] = {"trainer__max_steps": 600, "trainer__save_every": 10**6, "trainer__eval_every": 500}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train_run(folder / "run", write_text(folder / "text.txt"), 2, **OPTIONS)


@pytest.mark.parametrize("script", ["slurm.sbatch", "srun.sbatch"])
def test_a_job_that_is_warned_requeued_and_preempted_ends_with_the_same_bits(
    script: str, cluster: Cluster, undisturbed: Path, text: Path, tmp_path: Path
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out.txt"
    job = cluster.submit(f"--output={out}", f"launch/{script}", *run_args(run_dir, text, **OPTIONS))
    disturbances: list[Callable[[], Any]] = [
        lambda: cluster.run("scancel", "--signal=USR1", job),  # like --signal=USR1@120
        lambda: cluster.run("scontrol", "requeue", job),
        cluster.preempt,
    ]
    for starts, disturb in enumerate(disturbances, start=1):
        wait_until(lambda: has_trained(run_dir, starts), f"start {starts}", TIMEOUT)  # noqa: B023
        disturb()
        cluster.wait_for_requeue(job, restarts=starts)
    ended = cluster.wait_for_end(job)

    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "3"), out.read_text()
    assert {row["world_size"] for row in read_rows(run_dir)} == {2}
    stops = read_rows(run_dir, "stop")
    assert [row["signal"] for row in stops] == ["SIGUSR1", "SIGTERM", "SIGTERM", None]
    # Each start resumes at the step where the previous one stopped.
    assert [row["step"] for row in read_rows(run_dir, "start")] == [0, *(row["step"] for row in stops[:-1])]
    assert_same_run(undisturbed, run_dir)


def has_trained(run_dir: Path, starts: int) -> bool:
    """Returns whether the run has made 20 steps since this start."""
    if not (run_dir / "metrics.jsonl").exists():
        return False
    started, steps = read_rows(run_dir, "start"), read_rows(run_dir)
    return len(started) == starts and bool(steps) and steps[-1]["step"] >= started[-1]["step"] + 20


def test_a_job_preempted_before_the_first_step_is_requeued(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    job = cluster.submit(f"--output={tmp_path}/out.txt", "launch/slurm.sbatch", *run_args(tmp_path / "run", text))
    wait_until(
        lambda: f"{job}.0" in cluster.run("squeue", "--steps", "--noheader", "--format=%i"), "torchrun starts", TIMEOUT
    )
    cluster.preempt()
    cluster.wait_for_requeue(job, restarts=1)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    cluster.run("scancel", job)
