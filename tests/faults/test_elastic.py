"""Losing a node and adding it again changes the speed of a run, but not its bits.

Two launchers of torchrun on this machine stand for two nodes, which differ only in their addresses.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mingpt.snapshot.folder import SnapshotFolder
from tests.faults.runs import Run
from tests.helpers import assert_equal_snapshots, free_port, loss_curve, run_args, train_run, write_text

STEPS, SAVE_EVERY = 1500, 50  # enough for a launcher to start while a single rank trains
OPTIONS: dict[str, Any] = {
    "distributed__reduction": "tree",  # only its bits are the same for another number of ranks
    "distributed__timeout_seconds": 20,
    "trainer__max_steps": STEPS,
    "trainer__save_every": SAVE_EVERY,
    "trainer__eval_every": 500,
}
# Launchers get ranks in the order of their addresses. All are addresses of this machine.
ADDRESS = {"before": "127.0.0.1", "lasting": "127.1", "after": "localhost"}
# A lost node is noticed after 5 x 1 s instead of 3 x 5, and the rendezvous waits 2 s for another one instead of 30.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(text: Path) -> Path:
    """The run folder of one undisturbed process."""
    rare = {"trainer__save_every": STEPS, "trainer__save_overhead": None}
    return train_run(text.with_name("whole"), text, **OPTIONS | rare)


def start_node(node: Run, position: str, port: int, is_host: bool) -> None:
    """Starts a launcher with one worker.

    Args:
        node: a separate run, maybe in the other node's folder
        position: key of ADDRESS, which determines its rank
        port: of the rendezvous
        is_host: whether it keeps the store of the rendezvous
    """
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
    # Without the variable, launchers of torch 2.13 keep the first store's address, and none can join again.
    node.start(*launcher, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def rows(nodes: list[Run], event: str) -> list[dict[str, Any]]:
    """Rows of the run folders of all nodes, ordered by time."""
    by_folder = {node.run_dir: node.rows(event) for node in nodes}
    return sorted((row for found in by_folder.values() for row in found), key=lambda row: row["time"])


def newest_step(nodes: list[Run]) -> int:
    return max([0, *(row["step"] for row in rows(nodes, "train")[-1:])])


def wait_for_start(nodes: list[Run], world_size: int, since: float) -> dict[str, Any]:
    """Waits until a number of ranks has started since a time and trained 20 steps; returns the row of the start."""
    starts: list[dict[str, Any]] = []

    def is_training() -> bool:
        starts[:] = (row for row in rows(nodes, "start") if row["time"] > since and row["world_size"] == world_size)
        return bool(starts) and newest_step(nodes) > starts[0]["step"] + 20

    nodes[0].wait(is_training, f"training with world_size {world_size}")
    return starts[0]


def snapshot_steps(run_dir: Path) -> list[int]:
    return [*SnapshotFolder(str(run_dir / "snapshots")).files()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second_dir", "positions"),
    [("first", ("before", "after")), ("second", ("after", "before"))],  # rank 0 is lost; the node that joins is rank 0
    ids=["shared folder", "a folder each"],
)
def test_a_node_that_is_lost_and_joins_again_changes_no_bit(
    second_dir: str, positions: tuple[str, str], text: Path, whole: Path, tmp_path: Path
) -> None:
    first, second, port = tmp_path / "first/run", tmp_path / second_dir / "run", free_port()
    argv = run_args(Path("run"), text, **OPTIONS)  # on one machine, all ranks must have the same run folder
    with ExitStack() as stack:
        for run_dir in {first, second}:
            run_dir.parent.mkdir()
        folders = (first, second, second)
        lasting, lost, joined = (stack.enter_context(Run(each, argv, cwd=each.parent)) for each in folders)
        start_node(lasting, "lasting", port, is_host=True)
        start_node(lost, positions[0], port, is_host=False)
        nodes = [lasting, lost]
        wait_for_start(nodes, 2, since=0)
        middle = newest_step(nodes) // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY * 5 // 2
        lasting.wait(lambda: newest_step(nodes) >= middle, f"step {middle}")

        killed_at = time.time()
        lost.kill()
        unfinished = [int(path.name[5:13]) for path in second.glob("snapshots/step_*.tmp")]
        time.sleep(0.2)  # until the last row can be read
        last = newest_step(nodes)
        alone = wait_for_start(nodes, 1, since=killed_at)
        # Training continued while an unfinished snapshot was being written.
        assert 0 <= last - alone["step"] <= SAVE_EVERY + max((last - step for step in unfinished), default=0)

        joined_at = time.time()
        start_node(joined, positions[1], port, is_host=False)
        together = wait_for_start(nodes, 2, since=joined_at)
        stop = rows(nodes, "stop")[-1]
        assert (stop["signal"], stop["step"]) == ("SIGTERM", together["step"])  # saved, so nothing is recomputed
        newer = "a newer snapshot in the joined folder"
        lasting.wait(lambda: max(snapshot_steps(second), default=0) >= together["step"], newer)
        assert lasting.finish() + joined.finish() == [0, 0], lasting.output() + joined.output()

    for run_dir in (first, second):
        assert_equal_snapshots(whole, run_dir)
        assert snapshot_steps(run_dir)[-3:] == [STEPS - 2 * SAVE_EVERY, STEPS - SAVE_EVERY, STEPS]
    losses, trained = dict(loss_curve(whole)), rows(nodes, "train")
    assert all(row["loss"] == losses[row["step"]] for row in trained)  # also of steps that were recomputed
    world_sizes = {row["step"]: row["world_size"] for row in trained}
    expected = [2] * alone["step"] + [1] * (together["step"] - alone["step"]) + [2] * (STEPS - together["step"])
    assert [world_sizes[step] for step in sorted(world_sizes)] == expected
    rank0_dir = first if positions[1] == "after" else second
    assert loss_curve(rank0_dir)[-1] == (STEPS, losses[STEPS])
