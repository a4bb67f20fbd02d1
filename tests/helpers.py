"""Helpers that start processes: small runs, programs, ranks of a gloo group; what they log, and waits for it."""

import faulthandler
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import pty
import random
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import main
from mingpt import program
from mingpt.monitoring.run_log import iter_metrics
from mingpt.snapshot.folder import SnapshotFolder

ROOT = Path(__file__).parent.parent

# A background job of a shell ignores SIGINT, and the processes that tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A run small enough for tests: 7,056 parameters, windows of 16, uneven shares on 2 and 3 ranks, dropout on.
SMALL_CONFIG = {
    "data.block_size": 16,
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.n_embd": 16,
    "model.dropout": 0.1,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 4,
    "trainer.batch_size": 7,
    "trainer.micro_batch_size": 2,
    "trainer.max_steps": 12,
    "trainer.precision": "fp32",
    "trainer.threads": 1,
    "trainer.log_every": 1,
    "trainer.eval_every": 4,
    "trainer.sample_every": "null",
    "trainer.save_every": 3,
    "distributed.timeout_seconds": 60,
}
NO_DROPOUT: dict[str, Any] = {"model__dropout": 0.0, "optimizer__decay_steps": 12}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
# Environment of processes that use GPUs, for tests marked `gpu`. conftest.py hides GPUs from all other tests.
_visible = os.environ.get("TEST_VISIBLE_GPUS", "all")
VISIBLE_GPUS = {"CUDA_VISIBLE_DEVICES": None if _visible == "all" else _visible}
# Values of a parameter `device`, for tests that run main.py with `run_on`.
ON_GPUS = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ("cpu", ON_GPUS)
SLOW_ON_CPU = (pytest.param("cpu", marks=pytest.mark.slow), ON_GPUS)

# Ranks are forks of a server that has imported everything once.
FORKSERVER = multiprocessing.get_context("forkserver")
CALLS = itertools.count()  # of `init_method`
PRELOAD = ["torch._dynamo", "torch.utils.tensorboard", "main", "trainer", "sample", "mingpt.parallel.sharded", "pytest"]
FORKSERVER.set_forkserver_preload(PRELOAD)


def write_text(path: Path, size: int = 3000) -> Path:
    """Writes a text with some structure and 13 distinct characters. Returns its path."""
    words = ["anna", "bob", "does", "eat", "figs", "\n"]
    source = random.Random(0)
    path.write_text(" ".join(source.choice(words) for _ in range(size))[:size], encoding="utf-8")
    return path


def run_args(run_dir: Path, text: Path | str, **changes: Any) -> list[str]:
    """Returns the command line of a small run. Changes are written like `trainer__max_steps=3`; `...` omits a key."""
    values = SMALL_CONFIG | {"trainer.run_dir": run_dir, "data.path": text}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    values = {name: value for name, value in values.items() if value is not ...}
    return [word for name, value in values.items() for word in (f"--{name}", "null" if value is None else str(value))]


def clean_env(**changes: str | None) -> dict[str, str]:
    """Returns this process's environment without launchers' variables. A change to None removes a variable."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    terminal = ("COLUMNS", "LINES")  # set in processes of pytest-xdist
    removed = (*launcher, *terminal)
    env = {k: v for k, v in os.environ.items() if k not in removed and not k.startswith(("SLURM_", "OMPI_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {k: v for k, v in (env | {"PYTHONPATH": path} | changes).items() if v is not None}


def free_port() -> int:
    """Returns a free port below 32768, so that the system does not assign it to another socket."""
    while True:
        port = random.SystemRandom().randrange(10000, 30000)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("", port))
            return port


def run_program(
    *argv: str, cwd: Path | None = None, timeout: float = 240, **env: str | None
) -> subprocess.CompletedProcess:
    """Runs a program of this repository to its end."""
    command = [sys.executable, *(str(ROOT / word) if word.endswith(".py") else word for word in argv)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=clean_env(**env), check=False
    )


def run_on_terminal(*argv: str | Path, **env: str | None) -> tuple[int, str]:
    """Runs a program of this repository on a new terminal of 80 columns. Returns its exit status and its output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    raw = b""
    command = [sys.executable, *(ROOT / word if str(word).endswith(".py") else word for word in argv)]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=clean_env(**env)) as process:
        os.close(slave)
        try:
            while part := os.read(master, 65536):
                raw += part
        except OSError:  # on Linux, when all processes have closed the other end
            pass
        os.close(master)
        return process.wait(60), raw.decode(errors="replace")


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    tmp_path: Path,
    timeout: float = 120,
    lost_rank: int | None = None,
) -> list[Any]:
    """Runs `body(*args)` on `world_size` processes, with RANK and a rendezvous file. Returns their results by rank.

    A body that raises an error fails the test with that rank's traceback. A body that takes longer than `timeout`
    seconds is killed. The rank `lost_rank` kills or stops itself, and its result is None.
    """
    processes, queue = start_ranks(world_size, body, *args, tmp_path=tmp_path)
    awaited = [process for rank, process in enumerate(processes) if rank != lost_rank]
    results, failures, deadline = {}, [], time.monotonic() + timeout
    while not queue.empty() or (time.monotonic() < deadline and any(process.is_alive() for process in awaited)):
        if queue.empty():  # read while ranks run, since a large result fills the pipe
            time.sleep(0.01)
            continue
        rank, results[rank], failure = queue.get()
        failures += [f"rank {rank} of {world_size}:\n{failure}"] if failure else []
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    assert not failures, "\n".join(failures)
    results.setdefault(lost_rank, None)
    exits = {rank: process.exitcode for rank, process in enumerate(processes) if rank not in results}
    assert not exits, f"ranks died or hung, with these exit codes (-9: killed after the timeout): {exits}"
    return [results.get(rank) for rank in range(world_size)]


def start_ranks(world_size: int, body: Callable[..., Any], *args: Any, tmp_path: Path) -> tuple[list[Any], Any]:
    """Starts `world_size` processes like `run_ranks`. Returns them and the queue of their results."""
    rendezvous_file, queue = tmp_path / f"rendezvous-{time.monotonic_ns()}", FORKSERVER.SimpleQueue()
    processes = [
        FORKSERVER.Process(target=_rank, args=(queue, rank, world_size, rendezvous_file, clean_env(), body, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes, queue


def _rank(queue: Any, rank: int, world_size: int, rendezvous_file: Path, env: dict, body: Any, args: tuple) -> None:
    faulthandler.enable(file=2)  # a rank that dies prints its threads
    os.environ.clear()  # the server keeps the variables of the first test
    os.environ.update(env)
    if world_size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["TEST_INIT_METHOD"] = f"file://{rendezvous_file}"
    try:
        queue.put((rank, body(*args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def run_main(argv: list[str]) -> int:
    """Runs main.py in this process. Returns the exit status."""
    return program.run_program(main.main, argv)


def init_method() -> str:
    """For `run_ranks`: returns a new address, the same one on all ranks, which make the same calls."""
    return f"{os.environ.get('TEST_INIT_METHOD', 'file:///unused')}-{next(CALLS)}"


def train_main(*argv: str) -> int:
    """For `run_ranks`: runs main.py in this process. Returns the exit status."""
    return run_main(["--distributed.init_method", init_method(), *argv])


def run_captured(*argv: str) -> tuple[int, str, str]:
    """For `run_ranks`: runs main.py in this process. Returns exit status, stdout and stderr."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        status = train_main(*argv)
    return status, stdout.getvalue(), stderr.getvalue()


def main_process(argv: list[str], stdout: Path | str, stderr: Path | str) -> None:
    """For `start_ranks`: runs main.py with its output in these files or pipes, and ends the process."""
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), descriptor)
    # The server's streams may have been opened for other kinds of files.
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = ["main.py", *argv]
    program.exit_process(program.run_program(main.main, argv))


def run_each_captured(argvs: list[list[str]]) -> list[tuple[int, str, str]]:
    """For `run_ranks`: calls `run_captured` with several command lines, one after the other."""
    return [run_captured(*argv) for argv in argvs]


@cache
def find_gpus() -> dict[str, Any]:
    """Returns the number of GPUs as `count`, and hardware and versions for bug reports as `report`."""
    done = run_program("-m", "tests.gpu.hardware", cwd=ROOT, **VISIBLE_GPUS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ranks_on(device: str, wanted: int, at_least: int = 1) -> int:
    """Returns the number of ranks to start, at most `wanted` and one per GPU. Skips a test that needs more."""
    if device == "cpu":
        return wanted
    gpus = find_gpus()["count"]
    if gpus < at_least:
        pytest.skip(f"needs {at_least} GPUs, since ranks exchange what it tests; there is {gpus}")
    return min(wanted, gpus)


def run_on(device: str, ranks: int, argvs: list[list[str]], folder: Path, timeout: float = 300) -> list[str]:
    """Runs main.py with these command lines in turn: on "cpu" with `run_ranks`, on "cuda" in new processes.

    Returns:
        stdout of each run
    """
    if device == "cpu":
        results = run_ranks(ranks, run_each_captured, argvs, tmp_path=folder, timeout=timeout)
        for status, _, err in [result for of_rank in results for result in of_rank]:
            assert status == 0, err
        return [out for _, out, _ in results[0]]
    launcher = [*TORCHRUN, f"--nproc_per_node={ranks}"] if ranks > 1 else []
    outputs = []
    for argv in argvs:
        done = run_program(*launcher, "main.py", *argv, **VISIBLE_GPUS)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    return outputs


def train_run(run_dir: Path, text: Path | str, ranks: int = 1, **changes: Any) -> Path:
    """Trains a small run to its end in new processes. Returns its folder."""
    run_on("cpu", ranks, [run_args(run_dir, text, **changes)], run_dir.parent, timeout=600)
    return run_dir


def read_rows(run_dir: Path, event: str = "train") -> list[dict]:
    """Returns the rows of metrics.jsonl with this event."""
    return [row for row in iter_metrics(run_dir / "metrics.jsonl") if row["event"] == event]


def assert_equal_snapshots(one: Path, other: Path) -> None:
    a, b = (SnapshotFolder(f"{run_dir}/snapshots").load_newest() or {} for run_dir in (one, other))
    assert a["step"] == b["step"]
    for name, weight in a["model"].items():
        assert torch.equal(weight, b["model"][name]), name
        for key, value in a["optimizer"][name].items():
            assert torch.equal(value, b["optimizer"][name][key]), (name, key)


def loss_curve(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_rows(run_dir)]


def wait_for_step(run_dir: Path, step: int, timeout: float = 60) -> None:
    file = run_dir / "metrics.jsonl"
    wait_until(
        lambda: file.exists() and any(row["step"] >= step for row in read_rows(run_dir)), f"step {step}", timeout
    )


def wait_until(
    condition: Callable[[], bool], name: str, timeout: float = 60, process: subprocess.Popen | None = None
) -> None:
    """Waits for a condition that must become true before `process` ends, if there is one."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{name}: not within {timeout} s"
        time.sleep(0.01)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def in_namespace(name: str) -> list[str]:
    """Returns the start of a command that runs in a network namespace, with a separate host name."""
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname host-{name}; exec "$@"', "-"]
