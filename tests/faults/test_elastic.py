"""A node that is lost, and one that comes back, change how fast a run goes and nothing else.

Two of torchrun's launchers on this machine stand for two nodes; only addresses, which order them, tell them apart.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, assert_equal_snapshots, clean_env, loss_curve, run_args, run_ranks, train_main, write_text

from mingpt.snapshot.storage import SnapshotStorage

STEPS, SAVE_EVERY = 2000, 50  # so many that a launcher can start while a single rank trains
KNOBS: dict[str, Any] = {
    "distributed__reduction": "tree",  # of another number of ranks, only the tree's bits are the same
    "distributed__timeout_seconds": 20,
    "trainer__max_steps": STEPS,
    "trainer__save_every": SAVE_EVERY,
    "trainer__eval_every": 500,
}
# Launchers take ranks in the order of their addresses, and all three are this machine's.
ADDRESS = {"before": "127.0.0.1", "lasting": "127.1", "after": "localhost"}
# A lost node is noticed after 5 x 1 s instead of 3 x 5, and another is waited for 2 s instead of 30.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"
PATIENCE = 90  # seconds for what takes ten


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(1, train_main, *run_args(folder / "run", text, **KNOBS), tmp_path=folder) == [0]
    return folder / "run"


class Node:
    """A launcher and its worker.

    Args:
        place: address that decides its rank
        port: where launchers meet
        argv: of main.py
        hosts: whether it keeps the store that launchers meet at
        log: file for what both say
    """

    def __init__(self, place: str, port: int, argv: list[str], hosts: bool, log: Path) -> None:
        options = {
            "nnodes": "1:2",
            "nproc_per_node": 1,
            "max_restarts": 10,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"localhost:{port}",
            "rdzv_id": f"elastic-{port}",
            "rdzv_conf": f"{RENDEZVOUS},is_host={int(hosts)}",
            "local_addr": ADDRESS[place],
        }
        launcher = ["-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]
        self.mark = f"ELASTIC_NODE={uuid.uuid4().hex}"  # by which even an orphan is found
        # Without the variable, launchers of torch 2.13 keep the first store's address, and none can come back.
        env = clean_env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **dict([self.mark.split("=")]))
        self.log = log
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(ROOT / "main.py"), *argv],
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """The launcher and its worker, as far as they live."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended since, or is another user's
                if self.mark in (folder / "environ").read_text(errors="replace").split("\0"):
                    found.append(int(folder.name))
        return found

    def lose(self) -> None:
        """Ends all at once, as a loss of power does."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()


@contextmanager
def node(*args: Any) -> Iterator[Node]:
    started = Node(*args)
    try:
        yield started
    finally:
        started.lose()


class Watch:
    """What run folders tell of a run while it goes on.

    Args:
        run_dirs: its folders
        nodes: whose end is not expected
    """

    def __init__(self, run_dirs: set[Path], nodes: list[Node]) -> None:
        self.run_dirs, self.nodes = run_dirs, nodes

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Rows of all folders, in the order of their time."""
        lines: list[bytes] = []
        for run_dir in self.run_dirs:
            with suppress(FileNotFoundError):
                lines += (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return sorted((row for row in found if row["event"] == event), key=lambda row: row["time"])

    def wait(self, until: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until():
            ended = any(member.process.poll() is not None for member in self.nodes)
            if ended or time.monotonic() > deadline:
                when = "before the end" if ended else f"within {PATIENCE} s"
                raise AssertionError(f"{what}: not {when}\n{self.said()}")
            time.sleep(0.05)

    def said(self) -> str:
        """The end of what the nodes have printed."""
        return "\n".join(f"--- {member.log.name}\n{member.log.read_text()[-6000:]}" for member in self.nodes)

    def trains(self, world_size: int, since: float) -> dict[str, Any]:
        """Waits until so many ranks have gone on since a time and trained for a while; returns their start's row."""

        def start() -> dict[str, Any] | None:
            starts = [row for row in self.rows("start") if row["time"] > since and row["world_size"] == world_size]
            return starts[0] if starts and self.step() > starts[0]["step"] + 20 else None

        self.wait(lambda: start() is not None, f"training with world_size {world_size}")
        return start() or {}

    def step(self) -> int:
        """The newest step."""
        return max([0, *(row["step"] for row in self.rows("train")[-1:])])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "places"),
    [("first", ("before", "after")), ("second", ("after", "before"))],  # rank 0 is lost; rank 0 is who comes back
    ids=["shared", "apart"],
)
def test_a_node_that_is_lost_and_comes_back_leaves_the_same_bits(
    second: str, places: tuple[str, str], text: Path, whole: Path, tmp_path: Path
) -> None:
    one, other, port = tmp_path / "first", tmp_path / second, free_port()

    def started(place: str, run_dir: Path, name: str) -> Node:
        argv = run_args(run_dir, text, **KNOBS)
        return stack.enter_context(node(place, port, argv, name == "lasting", tmp_path / f"{name}.log"))

    with ExitStack() as stack:
        nodes = [started("lasting", one, "lasting"), started(places[0], other, "lost")]
        watch = Watch({one, other}, nodes)
        watch.trains(2, since=0)
        middle = watch.step() // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY * 5 // 2
        watch.wait(lambda: watch.step() >= middle, f"step {middle}")

        lost, killed = nodes.pop(), time.time()
        lost.lose()
        torn = [int(path.name[5:13]) for path in other.glob("snapshots/step_*.tmp")]
        time.sleep(0.2)  # until what was written last is there to be read
        last = watch.step()
        alone = watch.trains(1, since=killed)
        # A snapshot that was being written is none, and steps went on meanwhile.
        assert 0 <= last - alone["step"] <= SAVE_EVERY + max((last - step for step in torn), default=0)

        came = time.time()
        nodes.append(started(places[1], other, "back"))
        again = watch.trains(2, since=came)
        stop = watch.rows("stop")[-1]
        assert stop["signal"] == "SIGTERM"
        assert stop["step"] == again["step"], "who was told to stop has saved, and nothing is recomputed"
        watch.wait(lambda: again["step"] in steps(other), "who comes back gets the newest snapshot")
        for member in nodes:
            assert member.process.wait(PATIENCE) == 0, watch.said()

    for run_dir in (one, other):
        assert_equal_snapshots(whole, run_dir)
        assert steps(run_dir)[-3:] == [STEPS - 2 * SAVE_EVERY, STEPS - SAVE_EVERY, STEPS]
    losses, recorded = dict(loss_curve(whole)), watch.rows("train")
    assert all(row["loss"] == losses[row["step"]] for row in recorded), "also of steps that were recomputed"
    merged = {row["step"]: row["world_size"] for row in recorded}
    sizes = [2] * alone["step"] + [1] * (again["step"] - alone["step"]) + [2] * (STEPS - again["step"])
    assert [merged[step] for step in sorted(merged)] == sizes
    assert loss_curve(one if places[1] == "after" else other)[-1] == (STEPS, losses[STEPS]), (
        "rank 0 is at the first address"
    )


def steps(run_dir: Path) -> list[int]:
    return SnapshotStorage(str(run_dir / "snapshots"), keep=9).steps()
