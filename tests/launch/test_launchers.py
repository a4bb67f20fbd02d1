"""Who a process is, under every launcher: exact environments, and the real launchers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import ROOT, clean_env, free_port, run_args, write_text

import main
from mingpt.distributed.launch_environment import RankInfo, detect_launch_environment, resolve_init_method
from mingpt.utils.errors import UserError

MASTER = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29400"}
HAND = {"RANK": "1", "WORLD_SIZE": "4"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MASTER}
DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", **MASTER}
BATCH = {  # a batch script's shell
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_NODELIST": "node[01-03,07],gpu5",
}
STEP = BATCH | {  # a task that srun has started there
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "5",
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
MEETING = "file:///run/ompi.12622/meeting-prterun-vm-12622@1"


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, RankInfo()),
        (MASTER, RankInfo()),  # accelerate launch --cpu sets no more
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankInfo()),
        (HAND, RankInfo(1, 4)),
        (HAND | MASTER, RankInfo(1, 4, init_method="env://")),
        (HAND | {"MASTER_ADDR": "gpu1"}, RankInfo(1, 4)),
        (TORCHRUN, RankInfo(2, 4, 0, 2, "env://")),
        (DEEPSPEED, RankInfo(1, 2, 1, None, "env://")),
        (BATCH, RankInfo()),
        (BATCH | MASTER, RankInfo()),
        (STEP, RankInfo(3, 5, 1, None, f"tcp://node01:{STEP_PORT}", ".meeting-4711.2.0")),
        (
            STEP | {"SLURM_RESTART_COUNT": "1"},
            RankInfo(3, 5, 1, None, f"tcp://node01:{STEP_PORT}", ".meeting-4711.2.1"),
        ),
        (STEP | MASTER, RankInfo(3, 5, 1, None, "env://", ".meeting-4711.2.0")),
        (STEP | MASTER | {"WORLD_SIZE": "5"}, RankInfo(3, 5, 1, None, "env://", ".meeting-4711.2.0")),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "1"},
            RankInfo(3, 5, 1, None, f"tcp://127.0.0.1:{STEP_PORT}", ".meeting-4711.2.0"),
        ),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, RankInfo()),
        (STEP | TORCHRUN, RankInfo(2, 4, 0, 2, "env://")),  # a launcher that srun has started on each machine
        (STEP | MPIRUN, RankInfo(1, 2, 1, 2, MEETING)),  # mpirun's daemons are a SLURM step, and its ranks inherit that
        (MPIRUN, RankInfo(1, 2, 1, 2, MEETING)),
        (MPIRUN | MASTER, RankInfo(1, 2, 1, 2, "env://")),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, RankInfo(1, 4, 1, 2)),  # on two machines
        (BATCH | MPIRUN, RankInfo(1, 2, 1, 2, MEETING)),
    ],
)
def test_who_am_i(env: dict[str, str], place: RankInfo) -> None:
    assert detect_launch_environment(env) == place


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node01", "node01"),
        ("node01,node02", "node01"),
        ("node[01-03,07],gpu5", "node01"),
        ("gpu5,node[01-03,07]", "gpu5"),
        ("node[007,009-010]", "node007"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("cn-[3,5]-ib.example.org", "cn-3-ib.example.org"),
    ],
)
def test_a_slurm_steps_first_machine(nodes: str, first: str) -> None:
    assert detect_launch_environment(STEP | {"SLURM_STEP_NODELIST": nodes}).init_method == f"tcp://{first}:{STEP_PORT}"


def test_the_port_of_a_slurm_step() -> None:
    """Within what no system hands out by itself, and another one for each job and each step of a job."""
    ports = [
        int(
            str(
                detect_launch_environment(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).init_method
            ).split(":")[-1]
        )
        for job in range(999_990, 1_000_010)
        for step in range(10)
    ]
    assert len(set(ports)) == 200
    assert min(ports) >= 10000
    assert max(ports) < 30000


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE': None"),
        ({"WORLD_SIZE": "2"}, "RANK': None"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK': '2'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK': '-1'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK': 'x'"),
        (HAND | {"LOCAL_RANK": "x"}, "LOCAL_RANK': 'x'"),
        (BATCH | {"WORLD_SIZE": "2"}, "RANK': None"),
        (BATCH | {"SLURM_STEP_ID": "0"}, "SLURM_STEP_NUM_TASKS': None"),
        (STEP | {"SLURM_PROCID": "first"}, "SLURM_PROCID': 'first'"),
        (STEP | {"SLURM_PROCID": "5"}, "SLURM_PROCID': '5'"),
        (STEP | {"WORLD_SIZE": "8"}, "WORLD_SIZE': '8'"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE': None"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK': None"),
        (MPIRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE': '8'"),
    ],
)
def test_half_an_environment_is_refused(env: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=r"environment: .* from 0 to ") as refusal:
        detect_launch_environment(env)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "env",
    [
        HAND,
        HAND | {"MASTER_ADDR": "gpu1"},
        STEP | {"MASTER_PORT": "29400"},
        STEP | {"SLURM_STEP_NODELIST": ""},
        MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"},
        {name: value for name, value in MPIRUN.items() if name != "PMIX_SERVER_TMPDIR"},
    ],
)
def test_ranks_that_know_no_address_are_refused(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in MASTER:
        monkeypatch.delenv(name, raising=False)
        if name in env:
            monkeypatch.setenv(name, env[name])
    place = detect_launch_environment(env)
    with pytest.raises(UserError, match=r"MASTER_ADDR.*MASTER_PORT.*distributed\.init_method") as refusal:
        resolve_init_method(place, None, str(tmp_path))
    assert f"rank {place.rank} of {place.size}" in str(refusal.value)
    assert str(env.get("MASTER_ADDR")) in str(refusal.value)
    assert resolve_init_method(place, "tcp://gpu1:29400", str(tmp_path)) == "tcp://gpu1:29400"


def test_machines_without_an_address_meet_in_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs/mine"
    assert resolve_init_method(detect_launch_environment(STEP | MASTER), None, str(run_dir)) == "env://"
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [host])
    assert resolve_init_method(detect_launch_environment(STEP), None, str(run_dir)) == f"tcp://node01:{STEP_PORT}"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolve_init_method(detect_launch_environment(STEP), "tcp://gpu1:29400", str(run_dir)) == "tcp://gpu1:29400"
    assert not run_dir.exists()
    assert (
        resolve_init_method(detect_launch_environment(STEP), None, str(run_dir))
        == f"file://{run_dir}/.meeting-4711.2.0"
    )
    assert run_dir.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run_dir: .*file/below"):
        resolve_init_method(detect_launch_environment(STEP), None, str(tmp_path / "file/below"))


def unknown(host: str, port: None) -> list:
    raise socket.gaierror(f"{host} is not known")


@pytest.mark.parametrize(
    ("env", "says"), [(HAND | MASTER, True), (TORCHRUN, True), (TORCHRUN | {"LOCAL_RANK": "1"}, False)]
)
def test_who_says_that_the_yaml_is_wrong(
    env: dict[str, str], says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Under a launcher one process of each machine; ranks started by hand all do, for each may have its own yaml."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bad.yaml").write_text("trainer: {max_step: 3}")
    assert main.run(["--config", str(tmp_path / "bad.yaml")]) == 2
    assert ("trainer.max_step" in capsys.readouterr().err) == says


# The real launchers. Each command line starts main.py "$@" on two processes; $PORT is free.
MAIN = 'python main.py "$@"'
RANKS = f"RANK=0 WORLD_SIZE=2 {MAIN} & RANK=1 WORLD_SIZE=2 {MAIN} && wait $!"
NODE = 'torchrun --nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:$PORT main.py "$@"'
STEP_ENV = "export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2"
LAUNCHERS = {
    "torchrun on two nodes": f"{NODE} & {NODE} && wait $!",
    "torch.distributed.launch": 'python -m torch.distributed.launch --nproc_per_node=2 main.py "$@"',
    "the same, --use_env": 'python -m torch.distributed.launch --use_env --nproc_per_node=2 main.py "$@"',
    "shells, env://": f"export MASTER_ADDR=localhost MASTER_PORT=$PORT; {RANKS}",
    "shells, tcp://": f'set -- "$@" --distributed.init_method tcp://localhost:$PORT; {RANKS}',
    "shells, file://": f'set -- "$@" --distributed.init_method file://$TMPDIR/meeting; {RANKS}',
    "multiprocessing": 'python launch/by_hand.py 2 "$@"',
    "accelerate": 'accelerate launch --multi_gpu --num_processes=2 --main_process_port=$PORT main.py "$@"',
    "torchx": 'torchx run -s local_cwd dist.ddp -j 1x2 --script main.py -- "$@"',
    "deepspeed": 'deepspeed --num_gpus=2 --master_port=$PORT main.py "$@"',
    "mpirun": f"mpirun --allow-run-as-root --oversubscribe -n 2 {MAIN}",
    "srun's environment on one machine": (
        f"{STEP_ENV} SLURM_JOB_ID=$((PORT - 10000)) SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=nowhere1; "
        f"SLURM_PROCID=0 SLURM_LOCALID=0 {MAIN} & SLURM_PROCID=1 SLURM_LOCALID=1 {MAIN} && wait $!"
    ),
    "srun's environment on machines without an address": (
        f"{STEP_ENV} SLURM_JOB_ID=1 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST='nowhere[1-2]'; "
        f"SLURM_PROCID=0 SLURM_LOCALID=0 {MAIN} & SLURM_PROCID=1 SLURM_LOCALID=0 {MAIN} && wait $!"
    ),
}


@pytest.fixture(scope="module")
def torchrun_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What two processes under torchrun see."""
    folder = tmp_path_factory.mktemp("torchrun")
    return losses('torchrun --standalone --nproc_per_node=2 main.py "$@"', folder, 2)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_real_launcher(launcher: str, torchrun_losses: list[float], tmp_path: Path) -> None:
    if launcher in ("accelerate", "torchx", "deepspeed", "mpirun") and shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed; pip install -r .ci/requirements.txt")
    assert losses(LAUNCHERS[launcher], tmp_path, 2) == torchrun_losses
    assert (tmp_path / "run/.meeting-1.0.0").exists() == launcher.endswith("without an address")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        MAIN,
        'accelerate launch --cpu --num_processes=2 main.py "$@"',  # it says 2, and starts one
        f"SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2 {MAIN}",  # a batch script's shell
    ],
)
def test_one_process(command: str, tmp_path: Path) -> None:
    if "accelerate" in command and shutil.which("accelerate") is None:
        pytest.skip("accelerate is not installed; pip install -r .ci/requirements.txt")
    losses(command, tmp_path, 1)


def losses(command: str, folder: Path, size: int) -> list[float]:
    """The losses of a run of two steps that this command line starts, on so many processes."""
    run_dir, text, aside = folder / "run", write_text(folder / "text.txt"), folder / "aside"
    aside.mkdir()
    env = clean_env(
        PORT=str(free_port()),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        TMPDIR=str(aside),
        HF_HOME=str(aside),
    )
    argv = run_args(run_dir, text, trainer__max_steps=2)
    with subprocess.Popen(
        ["bash", "-c", command, "bash", *argv],
        cwd=ROOT,
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            said, _ = process.communicate(timeout=240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers, not in the group, then leave by themselves
    assert process.returncode == 0, said
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["event"] == "train"]
    assert [(row["step"], row["world_size"]) for row in train] == [(1, size), (2, size)], said
    return [row["loss"] for row in train]
