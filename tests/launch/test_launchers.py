"""Real launchers, which all start the same run on two processes. SLURM and Kubernetes have separate files."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import ROOT, clean_env, free_port, read_rows, run_args, write_text

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def torchrun_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run_launcher('torchrun --standalone --nproc_per_node=2 main.py "$@"', tmp_path_factory.mktemp("torchrun"), 2)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_losses_equal_those_under_torchrun(launcher: str, torchrun_losses: list[float], tmp_path: Path) -> None:
    skip_if_missing(launcher)
    assert run_launcher(LAUNCHERS[launcher], tmp_path, 2) == torchrun_losses


@pytest.mark.parametrize("command", [MAIN, 'accelerate launch --cpu --num_processes=2 main.py "$@"'])
def test_one_process(command: str, tmp_path: Path) -> None:
    """accelerate's --cpu starts one process, regardless of --num_processes."""
    skip_if_missing(command.split(maxsplit=1)[0])
    run_launcher(command, tmp_path, 1)


def skip_if_missing(launcher: str) -> None:
    if launcher in INSTALL and shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed; {INSTALL[launcher]}")


def run_launcher(command: str, folder: Path, world_size: int) -> list[float]:
    """Returns the losses of a run of two steps that this command line starts."""
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__max_steps=2)
    temporary = folder / "temporary"
    temporary.mkdir()
    env = {"PORT": str(free_port()), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-c", command, "bash", *argv],
        cwd=ROOT,
        env=clean_env(**env, TMPDIR=str(temporary), HF_HOME=str(temporary)),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers, in other groups, exit by themselves
    assert process.returncode == 0, output
    rows = read_rows(folder / "run")
    assert [(row["step"], row["world_size"]) for row in rows] == [(1, world_size), (2, world_size)], output
    return [row["loss"] for row in rows]
