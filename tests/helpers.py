"""Helpers of the tests: small runs, the real program, N processes that form a gloo group, contents of a run folder."""

from __future__ import annotations

import fcntl
import io
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.config import GPTConfig
from mingpt.config_parser import read_config
from mingpt.distributed.process_group import init_distributed
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.utils.metrics import read_metrics
from model import GPT
from trainer import Trainer

ROOT = Path(__file__).parent.parent

# A shell's background job has Ctrl-C ignored, and so would have all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A run small enough for tests: 7,056 parameters, windows of 16, shares that are uneven on 2 and 3 ranks, dropout on.
SMALL = {
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

# Children start as forks of one server that has imported all once, and done what each would do first.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "main",
        "sample",
        "mingpt.parallel.sharded",
        "pytest",
        "tests.warm",
    ]
)


def write_text(path: Path, size: int = 3000) -> Path:
    words = ["anna", "bob", "does", "eat", "figs", "\n"]
    source = random.Random(0)
    path.write_text(" ".join(source.choice(words) for _ in range(size))[:size], encoding="utf-8")
    return path


def arguments(run_dir: Path, text: Path | str, **changes: Any) -> list[str]:
    """The command line of a small run; changes are `trainer__max_steps=3`."""
    knobs = SMALL | {"trainer.run_dir": run_dir, "data.path": text}
    knobs |= {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in knobs.items() for word in (f"--{name}", "null" if value is None else str(value))]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what a launcher may have set."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    mine = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith(("SLURM_", "OMPI_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return mine | {"PYTHONPATH": path} | changes


def free_port() -> int:
    """A port that nobody listens at, and that the system hands to nobody else: those are above 32767."""
    while True:
        port = random.SystemRandom().randrange(10000, 30000)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("", port))
            return port


def program(*argv: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """Runs a program of this repository to its end."""
    command = [sys.executable, *(str(ROOT / word) if word.endswith(".py") else word for word in argv)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=cwd, env=environment(**env), check=False
    )


@contextmanager
def start(argv: list[str], *launcher: str, **env: str) -> Iterator[subprocess.Popen]:
    """Starts main.py, as `python LAUNCHER main.py ARGV`, and ends it if the block does not."""
    command = [sys.executable, *launcher, str(ROOT / "main.py"), *argv]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**env)
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers
                process.communicate(timeout=60)


def on_terminal(
    *argv: str | Path,
    columns: int = 80,
    watch: Callable[[subprocess.Popen, int, bytes], None] = lambda process, master, raw: None,
    **env: str,
) -> tuple[int, str]:
    """Runs a program of this repository on a terminal of its own; exit status, and all that it wrote there.

    `watch` is called with the process, the terminal's other end and all so far, whenever the program has written.
    """
    master, slave = pty.openpty()
    set_columns(slave, columns)
    raw = b""
    command = [sys.executable, *(ROOT / word if str(word).endswith(".py") else word for word in argv)]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment(**env)) as process:
        os.close(slave)
        try:
            while part := os.read(master, 65536):
                raw += part
                watch(process, master, raw)
        except OSError:  # how Linux says that nobody has the other end any more
            pass
        os.close(master)
        return process.wait(60), raw.decode(errors="replace")


def set_columns(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def ranks(
    number: int,
    body: Callable[..., Any],
    *args: Any,
    tmp_path: Path,
    patience: float = 120,
    gone: int | None = None,
) -> list[Any]:
    """Runs `body(*args)` on `number` processes that know each other by RANK and a file; returns results by rank.

    A body that raises fails the test with that rank's traceback; one that hangs for so many seconds is killed. The
    rank `gone` kills or stops itself, and has None for a result.
    """
    meeting = tmp_path / f"meeting-{time.monotonic_ns()}"
    results = PROCESSES.SimpleQueue()
    processes = [
        PROCESSES.Process(target=_rank, args=(results, rank, number, meeting, environment(), body, args))
        for rank in range(number)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + patience
    for rank in sorted(range(number), key=lambda rank: rank == gone):
        if rank != gone:
            processes[rank].join(max(0.1, deadline - time.monotonic()))
        if processes[rank].is_alive():
            processes[rank].kill()
            processes[rank].join()
    found = {}
    while not results.empty():
        rank, value, failure = results.get()
        assert failure is None, f"rank {rank} of {number}:\n{failure}"
        found[rank] = value
    ends = {rank: process.exitcode for rank, process in enumerate(processes) if rank not in found | {gone: None}}
    assert not ends, f"ranks died or hung, with these exit codes (-9: killed for hanging): {ends}"
    return [found.get(rank) for rank in range(number)]


def _rank(
    results: Any, rank: int, number: int, meeting: Path, env: dict[str, str], body: Callable[..., Any], args: tuple
) -> None:
    os.environ.clear()  # the server's, of when the first test began
    os.environ.update(env)
    if number > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(number))
    os.environ["TEST_INIT_METHOD"] = f"file://{meeting}"
    try:
        results.put((rank, body(*args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def train(*argv: str) -> int:
    """For `ranks`: one training run in this process, which meets the others at a file."""
    from main import run

    return run([*argv, "--distributed.init_method", os.environ["TEST_INIT_METHOD"]])


def run_captured(*argv: str) -> tuple[int, str, str]:
    """For `ranks`: exit status, stdout and stderr of a run."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        status = train(*argv)
    return status, stdout.getvalue(), stderr.getvalue()


V, T = 11, 8
NO_DROPOUT: dict[str, Any] = {"model__dropout": 0.0, "optimizer__decay_steps": 12}


def rows(run_dir: Path, event: str = "train") -> list[dict]:
    """A line that is being written yet is left out."""
    found, others = read_metrics(run_dir / "metrics.jsonl")
    assert not others
    return [row for row in found if row["event"] == event]


def newest(run_dir: Path) -> dict:
    snapshot = SnapshotStorage(str(run_dir / "snapshots"), keep=9).newest(print)
    assert snapshot is not None
    return snapshot


def assert_same_bits(one: Path, other: Path) -> None:
    a, b = newest(one), newest(other)
    assert a["step"] == b["step"]
    for name, weight in a["model"].items():
        assert torch.equal(weight, b["model"][name]), name
        for key, value in a["optimizer"][name].items():
            assert torch.equal(value, b["optimizer"][name][key]), (name, key)


def curve(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(run_dir)]


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and any(row["step"] >= step for row in rows(run_dir)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} not reached in 60 s")


def workers(agent: int) -> list[int]:
    """Process ids of an agent's workers, by local rank."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children}
    return sorted(
        (pid for pid, env in environments.items() if any(word.startswith("LOCAL_RANK=") for word in env)),
        key=lambda pid: next(word for word in environments[pid] if word.startswith("LOCAL_RANK=")),
    )


def small(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": V, "block_size": T} | changes))


def lively(**changes: Any) -> GPT:
    """A model with strong opinions, in float64: a fresh one repeats its last character, and near ties hide mistakes."""
    model = small(seed=3, **changes).double()
    for name, parameter in model.named_parameters():
        if "ln_" not in name:
            nn.init.normal_(parameter, std=1.0 if parameter.dim() == 2 else 0.2)
    return model


def characters(*shape: int, seed: int = 1, vocab_size: int = V) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


LARGE = {"data__block_size": 32, "model__n_layer": 4, "model__n_head": 8, "model__n_embd": 512}


KINDS = ("parameters", "gradients", "optimizer")


@contextmanager
def open_trainer(*argv: str, meeting: Any = "") -> Iterator[Trainer]:
    """A trainer in this process, one of those that `ranks` started; its words are swallowed."""
    config = read_config([*argv, "--distributed.init_method", f"{os.environ['TEST_INIT_METHOD']}-{meeting}"])
    with (
        init_distributed(config.distributed) as context,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        yield Trainer(config, context)


def losses(made: Trainer, steps: int) -> list[float]:
    """The whole batch's mean loss in each of so many steps."""
    return [made.state.strategy.mean(made.train_step()[0]).item() for _ in range(steps)]


def curves(folder: Path, combinations: list[dict[str, Any]], steps: int) -> list[list[float]]:
    """For `ranks`: the losses of each combination of knobs."""
    found = []
    for i, knobs in enumerate(combinations):
        argv = arguments(folder / f"{os.environ.get('WORLD_SIZE')}-{i}", folder / "text.txt", **NO_DROPOUT, **knobs)
        with open_trainer(*argv, meeting=i) as made:
            found.append(losses(made, steps))
    return found


def deviation(one: list[float], other: list[float]) -> float:
    """The largest relative difference between two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
