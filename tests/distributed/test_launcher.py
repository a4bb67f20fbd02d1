"""Ranks and addresses from launchers' variables, and the network interface if host names do not resolve."""

import subprocess
import sys
from pathlib import Path

import pytest

from mingpt.distributed.launcher import RankInfo, detect_launch_environment
from mingpt.distributed.rendezvous import resolve_init_method
from mingpt.errors import UserError
from tests.helpers import ROOT, clean_env, in_namespace, ip, read_rows, run_args, run_main

MASTER = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29400"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MASTER}
# Variables of the shell of a batch script, and of a task that srun starts in it
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "5"}
STEP = BATCH | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_STEP_NODELIST": "node[01-03,07],gpu5",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
}
STEP_PORT = 10000 + 4711 + 2 * 1009
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_SERVER_TMPDIR": "/run/ompi.12622",
    "PMIX_NAMESPACE": "prterun-vm-12622@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}  # and Intel MPI
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}
MPIRUN_FILE = "file:///run/ompi.12622/rendezvous-prterun-vm-12622@1"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, RankInfo()),
        (BY_HAND, RankInfo(1, 4)),
        (BY_HAND | MASTER, RankInfo(1, 4, init_method="env://")),
        (BATCH, RankInfo()),
        (STEP, RankInfo(3, 5, 1, None, f"tcp://node01:{STEP_PORT}")),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-2]m[01-04]-ib"}, RankInfo(3, 5, 1, None, f"tcp://n1m01-ib:{STEP_PORT}")),
        (STEP | MASTER | {"WORLD_SIZE": "5"}, RankInfo(3, 5, 1, None, "env://")),
        (STEP | {"SLURM_STEP_NUM_NODES": "1"}, RankInfo(3, 5, 1, None, f"tcp://127.0.0.1:{STEP_PORT}")),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, RankInfo()),
        (STEP | TORCHRUN, RankInfo(2, 4, 0, 2, "env://")),  # srun has started a launcher on each host
        (STEP | MPIRUN, RankInfo(1, 2, 1, 2, MPIRUN_FILE)),  # mpirun's daemons are a SLURM step
        (MPIRUN | MASTER, RankInfo(1, 2, 1, 2, "env://")),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, RankInfo(1, 4, 1, 2)),  # on two hosts
        (MPICH, RankInfo(1, 4, 1, 2)),
        (STEP | MPICH | MASTER, RankInfo(1, 4, 1, 2, "env://")),  # mpirun's daemons are a SLURM step
        (PMI | MASTER, RankInfo(3, 4, None, None, "env://")),
        # srun --mpi=pmi2
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "5"}, RankInfo(3, 5, 1, None, f"tcp://node01:{STEP_PORT}")),
    ],
)
def test_rank_info_of_each_launcher(env: dict[str, str], expected: RankInfo) -> None:
    assert detect_launch_environment(env) == expected


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE': None"),
        ({"WORLD_SIZE": "2"}, "RANK': None"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK': '2'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK': 'x'"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE': 'two'"),
        (BATCH | {"SLURM_STEP_ID": "0"}, "SLURM_STEP_NUM_TASKS': None"),
        (STEP | {"SLURM_PROCID": "5"}, "SLURM_PROCID': '5'"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE': None"),
    ],
)
def test_incomplete_and_invalid_variables_are_refused(env: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=r"^environment: .* from [01] to ") as error:
        detect_launch_environment(env)
    assert named in str(error.value)


NO_ADDRESS = [BY_HAND, BY_HAND | {"MASTER_ADDR": "gpu1"}, STEP | {"MASTER_PORT": "29400"}]


@pytest.mark.parametrize("env", [*NO_ADDRESS, MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, MPICH])
def test_ranks_without_an_address_are_refused(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MASTER:
        monkeypatch.delenv(name, raising=False)
        if name in env:
            monkeypatch.setenv(name, env[name])
    info = detect_launch_environment(env)
    for init_method in (None, "env://"):
        with pytest.raises(UserError, match=r"MASTER_ADDR.*MASTER_PORT.*distributed\.init_method") as error:
            resolve_init_method(info, init_method)
        assert f"rank {info.rank} of {info.world_size}" in str(error.value)
        assert str(env.get("MASTER_ADDR")) in str(error.value)
    assert resolve_init_method(info, "tcp://127.0.0.1:29400") == "tcp://127.0.0.1:29400"


def test_one_process_of_each_host_reports_a_mistake(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank that is started by hand reports it, since its yaml may differ from the others."""
    message = "set both (on one machine, for example MASTER_ADDR=127.0.0.1 MASTER_PORT=29500), or set "
    for env, reports in (
        (BY_HAND, 1),
        (MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, 1),
        (MPICH, 0),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3"}, 1),
    ):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert run_main(run_args(tmp_path / "run", text)) == 2
        error = capsys.readouterr().err
        assert (error.count("error: "), error.count(message)) == (reports, reports)


@pytest.mark.slow
@pytest.mark.parametrize("init_method", ["tcp://10.213.0.1:29500", "file"])
def test_hosts_whose_names_do_not_resolve_train_together(
    init_method: str, namespaces: list[str], text: Path, tmp_path: Path
) -> None:
    processes = []
    for rank, name in enumerate(namespaces):
        if init_method == "file":  # only the default route leads to the other host
            ip("-n", name, "route", "add", "default", "dev", "eth1")
        # Machines may have different run folders.
        argv = run_args(tmp_path / f"run-{rank}", text, trainer__max_steps=2, distributed__timeout_seconds=20)
        argv += ["--distributed.init_method", init_method.replace("file", f"file://{tmp_path}/store")]
        command = [*in_namespace(name), sys.executable, str(ROOT / "main.py"), *argv]
        env = clean_env(RANK=str(rank), WORLD_SIZE="2")
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    try:
        results = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [status for _, status in results] == [0, 0], results
    assert [row["world_size"] for row in read_rows(tmp_path / "run-0")] == [2, 2]
