"""Which rank is gone: the others leave in time, with its name, and the launcher's death leaves no orphans."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers import (
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_main,
    wait_for_step,
    worker_pids,
)

from mingpt.config import DistributedConfig
from mingpt.distributed.health import HealthMonitor
from mingpt.distributed.process_group import init_distributed
from mingpt.utils.errors import PeerError, StoreUnreachableError
from trainer import Trainer

TIMEOUT = 4


@pytest.mark.parametrize(
    ("method", "victim"),
    [
        ("tcp", 2),
        pytest.param("tcp", 0, marks=pytest.mark.slow),  # who keeps the store
        pytest.param("file", 0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("how", [pytest.param("SIGSTOP", marks=pytest.mark.slow), "SIGKILL"])
def test_a_rank_that_is_gone_is_named_by_all_others_in_time(
    how: str, method: str, victim: int, text: Path, tmp_path: Path
) -> None:
    port = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
    where = {"tcp": f"tcp://localhost:{port}", "file": f"file://{tmp_path}/meeting"}[method]
    knobs = {"trainer__max_steps": 1_000_000, "distributed__timeout_seconds": TIMEOUT}
    argv = run_args(tmp_path / "run", text, **knobs)
    found = run_ranks(3, _without_one, where, victim, getattr(signal, how), argv, lost_rank=victim, tmp_path=tmp_path)
    assert found.pop(victim) is None
    for status, err, seconds in found:
        assert status == 1
        assert seconds < TIMEOUT + 5
        assert err.count("error: ") == 1, err
        assert f"rank {victim}" in err.split("error: ")[1].split(", where")[0]
        assert all(f"rank {rank} (" not in err.split(", where")[0] for rank in {0, 1, 2} - {victim})
    assert newest_snapshot(tmp_path / "run")["step"] >= 3


def _without_one(where: str, victim: int, how: signal.Signals, argv: list[str]) -> tuple[int, str, float]:
    """The sixth step begins without the victim; returns status, stderr and the seconds from then on."""
    step, began = Trainer.train_step, []

    def alone(trainer: Trainer) -> Any:
        if trainer.state.step == 5:
            began.append(time.monotonic())
            if trainer.context.rank == victim:
                os.kill(os.getpid(), how)
        return step(trainer)

    Trainer.train_step = alone  # type: ignore[method-assign]
    os.environ["TEST_INIT_METHOD"] = where
    status, _, err = run_captured(*argv)
    return status, err, time.monotonic() - began[0]


def test_a_rank_that_crashes_says_so_to_the_others(tmp_path: Path) -> None:
    told = run_ranks(3, _crash, tmp_path=tmp_path)
    assert told[1] == "ZeroDivisionError: on purpose"
    for words in (told[0], told[2]):
        assert words.startswith("PeerError: rank 1 (")
        assert words.endswith("failed: ZeroDivisionError: on purpose")


def _crash() -> str:
    config = DistributedConfig(init_method=os.environ["TEST_INIT_METHOD"], timeout_seconds=20)
    try:
        with init_distributed(config) as context:
            if context.rank == 1:
                raise ZeroDivisionError("on purpose")
            context.all_gather_object(1)
    except (ZeroDivisionError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_waiting_for_a_word_outlasts_the_timeout_of_collectives(tmp_path: Path) -> None:
    assert run_ranks(2, _wait, 2, tmp_path=tmp_path) == [{1: "done"}] * 2


def _wait(seconds: int) -> dict[int, str]:
    config = DistributedConfig(init_method=os.environ["TEST_INIT_METHOD"], timeout_seconds=1)
    with init_distributed(config) as context:
        if context.rank == 1:
            time.sleep(seconds)
        return context.exchange_messages([1], "done" if context.rank == 1 else "")


def test_waiting_for_the_word_of_a_dead_rank_ends(tmp_path: Path) -> None:
    assert run_ranks(2, _wait_in_vain, tmp_path=tmp_path)[0].startswith("rank 1 (")


def _wait_in_vain() -> str:
    config = DistributedConfig(init_method=os.environ["TEST_INIT_METHOD"], timeout_seconds=30)
    with init_distributed(config) as context:
        if context.rank == 1:
            context.peers.leave()  # type: ignore[union-attr]  # its heart stops; the process lives
            context.all_gather_object(0)
            return ""
        try:
            context.exchange_messages([1], "")
        except PeerError as error:
            words = str(error)
        context.all_gather_object(0)
        return words


def test_a_store_that_is_gone_is_named() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    peers = HealthMonitor(dist.TCPStore("localhost", store.port, is_master=False), 1, 2, "rank 0")
    del store
    with pytest.raises(
        StoreUnreachableError, match=r"^rank 0, where ranks meet, is gone, stopped or cut off from rank 1 \("
    ):
        peers.exchange("word", [0])
    peers.leave()


HINT = "; start torchrun with --max_restarts=3 and it goes on by itself"


@pytest.mark.parametrize(("restarts", "hint"), [("0", HINT), ("3", ""), (None, "; the same command goes on")])
def test_what_to_do_when_a_rank_is_gone(restarts: str | None, hint: str, text: Path, tmp_path: Path) -> None:
    (status, err), _ = run_ranks(2, _crash_in_step, restarts, run_args(tmp_path / "run", text), tmp_path=tmp_path)
    assert status == 1
    assert err.endswith(f"failed: ZeroDivisionError: on purpose{hint}\n")


def _crash_in_step(restarts: str | None, argv: list[str]) -> tuple[int, str]:
    """The last rank's second step raises."""
    step = Trainer.train_step

    def crash(trainer: Trainer) -> Any:
        if trainer.context.rank == 1 and trainer.state.step == 1:
            raise ZeroDivisionError("on purpose")
        return step(trainer)

    Trainer.train_step = crash  # type: ignore[method-assign]
    if restarts is not None:  # as torchrun tells its workers
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = restarts
    try:
        status, _, err = run_captured(*argv)
    except ZeroDivisionError:
        return 1, ""
    return status, err


@pytest.mark.slow
def test_torchrun_without_restarts_is_told_of(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1_000_000)
    with start_main(argv, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2") as agent:
        wait_for_step(tmp_path / "run", 5)
        os.kill(worker_pids(agent.pid)[1], signal.SIGKILL)
        _, err = agent.communicate(timeout=60)
    [said] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said.endswith(HINT)


@pytest.mark.slow
def test_workers_leave_when_their_launcher_is_killed_and_lose_nothing(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = run_args(run, text, trainer__max_steps=1_000_000, trainer__save_every=100_000)
    with start_main(argv, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2") as agent:
        wait_for_step(run, 5)
        orphans = worker_pids(agent.pid)
        agent.kill()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in orphans):
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in orphans)
    assert newest_snapshot(run)["step"] == read_rows(run, "stop")[-1]["step"] == read_rows(run)[-1]["step"]
