"""Real launchers, which all start the same run, and the files of launch/. A SLURM cluster has a separate file."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.helpers import ROOT, clean_env, free_port, read_rows, run_args, write_text
from tests.inside import assert_one_message

# Command lines that start main.py "$@" on two processes; $PORT is free.
MAIN = 'python main.py "$@"'
RANKS = f"RANK=0 WORLD_SIZE=2 {MAIN} & RANK=1 WORLD_SIZE=2 {MAIN} && wait $!"
NODE = 'torchrun --nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:$PORT main.py "$@"'
LAUNCHERS = {
    "torchrun on two nodes": f"{NODE} & {NODE} && wait $!",
    "torch.distributed.launch": 'python -m torch.distributed.launch --nproc_per_node=2 main.py "$@"',
    "by hand": f"export MASTER_ADDR=localhost MASTER_PORT=$PORT; {RANKS}",
    "accelerate": 'accelerate launch --multi_gpu --num_processes=2 --main_process_port=$PORT main.py "$@"',
    "torchx": 'torchx run -s local_cwd dist.ddp -j 1x2 --script main.py -- "$@"',
    "deepspeed": 'deepspeed --num_gpus=2 --master_port=$PORT main.py "$@"',
    "mpirun": f"mpirun --allow-run-as-root --oversubscribe -n 2 {MAIN}",
    "mpirun.mpich": f"MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT mpirun.mpich -n 2 {MAIN}",
}
INSTALL = dict.fromkeys(("accelerate", "torchx", "deepspeed", "mpirun"), "pip install -r .ci/requirements.txt")
INSTALL["mpirun.mpich"] = "apt install mpich"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
KUBERNETES = (ROOT / "launch/kubernetes.yaml").read_text()


@pytest.fixture(scope="module")
def torchrun_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run_launcher('torchrun --standalone --nproc_per_node=2 main.py "$@"', tmp_path_factory.mktemp("torchrun"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_losses_equal_those_under_torchrun(launcher: str, torchrun_losses: list[float], tmp_path: Path) -> None:
    if launcher in INSTALL and shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed; {INSTALL[launcher]}")
    assert run_launcher(LAUNCHERS[launcher], tmp_path, 2) == torchrun_losses


def run_launcher(command: str, folder: Path, world_size: int, **variables: str) -> list[float]:
    """Returns the losses of a run of two steps that this command line starts."""
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__max_steps=2)
    temporary = folder / "temporary"
    temporary.mkdir()
    env = variables | {"PORT": str(free_port()), "TMPDIR": str(temporary), "HF_HOME": str(temporary), "PATH": PATH}
    options: dict[str, Any] = {"cwd": ROOT, "env": clean_env(**env), "text": True, "start_new_session": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(["bash", "-c", command, "bash", *argv], **options) as process:
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers, in other groups, exit by themselves
    assert process.returncode == 0, output
    rows = read_rows(folder / "run")
    assert [(row["step"], row["world_size"]) for row in rows] == [(1, world_size), (2, world_size)], output
    return [row["loss"] for row in rows]


def test_all_keys_of_the_kubernetes_job_are_in_the_operators_schema_also_those_for_gpus() -> None:
    """Its published models drop unknown keys."""
    pytest.importorskip("kubeflow.training", reason="kubeflow-training is not installed")
    from kubeflow.training.api_client import ApiClient

    client = ApiClient()
    kinds = {"PersistentVolumeClaim": "V1PersistentVolumeClaim", "PyTorchJob": "KubeflowOrgV1PyTorchJob"}
    for document in [*yaml.safe_load_all(KUBERNETES), *yaml.safe_load_all(KUBERNETES.replace("## ", ""))]:
        model = client.deserialize(SimpleNamespace(data=json.dumps(document)), kinds[document["kind"]])
        assert client.sanitize_for_serialization(model) == document


@pytest.mark.slow
def test_two_pods_of_the_kubernetes_job_train(tmp_path: Path) -> None:
    """The container's command with the variables that the operator sets (1.9, pkg/controller.v1/pytorch)."""
    _, job = yaml.safe_load_all(KUBERNETES)
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]} | {
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_CONF": "last_call_timeout=5",  # by default torchrun waits 30 seconds for more pods
    }
    assert worker["replicas"] == 2
    pod = f'PET_RDZV_ENDPOINT=127.0.0.1:$PORT {shlex.join(container["command"] + container["args"])} "$@"'
    run_launcher(f"{pod} & {pod} && wait $!", tmp_path, 2, **env)


@pytest.mark.slow
def test_the_image_has_all_files_that_its_programs_need(tmp_path: Path) -> None:
    instructions = re.findall(r"^COPY (.+)$", (ROOT / "launch/Dockerfile").read_text(), re.MULTILINE)
    for *sources, target in (instruction.split() for instruction in instructions):
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    scripts = ",".join(file.stem for file in tmp_path.glob("*.py"))
    for program in (["main.py", "--trainer.max_steps=1"], ["-c", f"import {scripts}"]):
        command, env = [sys.executable, *program], clean_env(PYTHONPATH="")
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def run_sbatch(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess:
    """Runs launch/slurm.sbatch in a folder with SLURM's commands."""
    (folder / "main.py").symlink_to(ROOT / "main.py")
    command = ["bash", str(ROOT / "launch/slurm.sbatch"), *args]
    env = clean_env(PATH=f"{folder}:{PATH}", SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="1", **env)
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=120, check=False)


@pytest.mark.parametrize(
    ("run_dir", "progress"), [("runs/try #2", True), pytest.param("2024-01-31", False, marks=pytest.mark.slow)]
)
def test_a_job_that_fails_is_requeued_if_it_has_made_progress(run_dir: str, progress: bool, tmp_path: Path) -> None:
    metrics, calls = tmp_path / run_dir / "metrics.jsonl", tmp_path / "calls"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"event": "start", "step": 0}\n')
    step = f"""echo '{{"event": "train", "step": 1}}' >> "{metrics}"; """ if progress else ""
    commands = {"srun": f"{step}exit 1", "scontrol": f'echo "$@" >> {calls}; test "$2" != hostnames || echo node1'}
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    nodes = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1"}
    done = run_sbatch(tmp_path, "--trainer.run_dir", run_dir, **nodes)
    assert (done.returncode, done.stderr) == (1, "")
    assert ("requeue 7" in calls.read_text().splitlines()) == progress


def test_a_mistake_ends_a_job_before_anything_starts(tmp_path: Path) -> None:
    done = run_sbatch(tmp_path, "--trainer.max_step", "3")
    assert done.returncode == 2
    assert_one_message(done.stderr, "error: trainer.max_step ")
