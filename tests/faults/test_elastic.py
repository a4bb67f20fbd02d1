"""A node that is lost, and one that joins again, change the speed of a run and no bit of it.

Two launchers of torchrun on this machine stand for two nodes, which differ by their addresses alone.
"""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    ROOT,
    assert_equal_snapshots,
    clean_env,
    free_port,
    kill_processes,
    loss_curve,
    run_args,
    run_ranks,
    train_main,
    write_text,
)

from mingpt.snapshot.storage import SnapshotStorage

STEPS, SAVE_EVERY = 2000, 50  # so many that a launcher can start while a single rank trains
OPTIONS: dict[str, Any] = {
    "distributed__reduction": "tree",  # only its bits are the same for another number of ranks
    "distributed__timeout_seconds": 20,
    "trainer__max_steps": STEPS,
    "trainer__save_every": SAVE_EVERY,
    "trainer__eval_every": 500,
}
# Launchers get ranks in the order of their addresses, all of which are this machine's.
ADDRESS = {"before": "127.0.0.1", "lasting": "127.1", "after": "localhost"}
# A lost node is noticed after 5 x 1 s instead of 3 x 5, and the rendezvous waits 2 s for another one instead of 30.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"
TIMEOUT = 90  # seconds for what takes ten


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one undisturbed process."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(1, train_main, *run_args(folder / "run", text, **OPTIONS), tmp_path=folder) == [0]
    return folder / "run"


class Node:
    """A launcher and its worker.

    Args:
        position: key of ADDRESS, which determines its rank
        port: of the rendezvous
        argv: of main.py
        is_host: whether it keeps the store of the rendezvous
        log: file for the output of both
    """

    def __init__(self, position: str, port: int, argv: list[str], is_host: bool, log: Path) -> None:
        options = {
            "nnodes": "1:2",
            "nproc_per_node": 1,
            "max_restarts": 10,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"localhost:{port}",
            "rdzv_id": f"elastic-{port}",
            "rdzv_conf": f"{RENDEZVOUS},is_host={int(is_host)}",
            "local_addr": ADDRESS[position],
        }
        launcher = ["-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]
        self.variable, self.log = f"ELASTIC_NODE={uuid.uuid4().hex}", log
        # Without the variable, launchers of torch 2.13 keep the first store's address, and none can join again.
        env = clean_env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **dict([self.variable.split("=")]))
        command = [sys.executable, *launcher, str(ROOT / "main.py"), *argv]
        with log.open("a") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)

    def kill(self) -> None:
        """Ends launcher and worker at once, as a loss of power does."""
        kill_processes(self.variable)
        self.process.wait()


@contextmanager
def start_node(*args: Any) -> Iterator[Node]:
    node = Node(*args)
    try:
        yield node
    finally:
        node.kill()


class Watch:
    """The progress of a run.

    Args:
        run_dirs: one, or one for each node
        nodes: those that must not exit
    """

    def __init__(self, run_dirs: set[Path], nodes: list[Node]) -> None:
        self.run_dirs, self.nodes = run_dirs, nodes

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Rows of all run folders, ordered by time."""
        lines: list[bytes] = []
        for run_dir in self.run_dirs:
            with suppress(FileNotFoundError):
                lines += (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return sorted((row for row in found if row["event"] == event), key=lambda row: row["time"])

    def step(self) -> int:
        """The newest step."""
        return max([0, *(row["step"] for row in self.rows("train")[-1:])])

    def output(self) -> str:
        """The end of the output of all nodes."""
        return "\n".join(f"--- {node.log.name}\n{node.log.read_text()[-6000:]}" for node in self.nodes)

    def wait(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            exited = any(node.process.poll() is not None for node in self.nodes)
            if exited or time.monotonic() > deadline:
                when = "before the end" if exited else f"within {TIMEOUT} s"
                raise AssertionError(f"{name}: not {when}\n{self.output()}")
            time.sleep(0.05)

    def wait_for_start(self, world_size: int, since: float) -> dict[str, Any]:
        """Waits until so many ranks have started since a time and trained 20 steps; returns the row of the start."""
        starts: list[dict[str, Any]] = []

        def is_training() -> bool:
            starts[:] = (row for row in self.rows("start") if row["time"] > since and row["world_size"] == world_size)
            return bool(starts) and self.step() > starts[0]["step"] + 20

        self.wait(is_training, f"training with world_size {world_size}")
        return starts[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second_dir", "positions"),
    [("first", ("before", "after")), ("second", ("after", "before"))],  # rank 0 is lost; the node that joins is rank 0
    ids=["shared folder", "a folder each"],
)
def test_a_node_that_is_lost_and_joins_again_changes_no_bit(
    second_dir: str, positions: tuple[str, str], text: Path, whole: Path, tmp_path: Path
) -> None:
    first, second, port = tmp_path / "first", tmp_path / second_dir, free_port()

    def start(position: str, run_dir: Path, name: str) -> Node:
        argv = run_args(run_dir, text, **OPTIONS)
        return stack.enter_context(start_node(position, port, argv, name == "lasting", tmp_path / f"{name}.log"))

    with ExitStack() as stack:
        nodes = [start("lasting", first, "lasting"), start(positions[0], second, "lost")]
        watch = Watch({first, second}, nodes)
        watch.wait_for_start(2, since=0)
        middle = watch.step() // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY * 5 // 2
        watch.wait(lambda: watch.step() >= middle, f"step {middle}")

        lost, killed_at = nodes.pop(), time.time()
        lost.kill()
        unfinished = [int(path.name[5:13]) for path in second.glob("snapshots/step_*.tmp")]
        time.sleep(0.2)  # until the last row can be read
        last = watch.step()
        alone = watch.wait_for_start(1, since=killed_at)
        # Training continued while an unfinished snapshot was being written.
        assert 0 <= last - alone["step"] <= SAVE_EVERY + max((last - step for step in unfinished), default=0)

        joined_at = time.time()
        nodes.append(start(positions[1], second, "joined"))
        together = watch.wait_for_start(2, since=joined_at)
        stop = watch.rows("stop")[-1]
        assert (stop["signal"], stop["step"]) == ("SIGTERM", together["step"])  # saved, so nothing is recomputed
        watch.wait(
            lambda: together["step"] in snapshot_steps(second), "the newest snapshot in the joined node's folder"
        )
        for node in nodes:
            assert node.process.wait(TIMEOUT) == 0, watch.output()

    for run_dir in (first, second):
        assert_equal_snapshots(whole, run_dir)
        assert snapshot_steps(run_dir)[-3:] == [STEPS - 2 * SAVE_EVERY, STEPS - SAVE_EVERY, STEPS]
    losses, rows = dict(loss_curve(whole)), watch.rows("train")
    assert all(row["loss"] == losses[row["step"]] for row in rows)  # also of steps that were recomputed
    world_sizes = {row["step"]: row["world_size"] for row in rows}
    expected = [2] * alone["step"] + [1] * (together["step"] - alone["step"]) + [2] * (STEPS - together["step"])
    assert [world_sizes[step] for step in sorted(world_sizes)] == expected
    rank0_dir = first if positions[1] == "after" else second
    assert loss_curve(rank0_dir)[-1] == (STEPS, losses[STEPS])


def snapshot_steps(run_dir: Path) -> list[int]:
    return SnapshotStorage(str(run_dir / "snapshots"), keep=9).steps()
