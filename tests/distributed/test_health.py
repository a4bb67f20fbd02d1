"""When a rank fails, the others name it and exit in time. When the launcher is killed, no process is left."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from mingpt.distributed import health
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.health import HealthMonitor
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.process_group import explained_errors
from mingpt.errors import PeerError, StoreUnreachableError, UserError
from mingpt.run import start
from tests.helpers import (
    free_port,
    main_process,
    newest_snapshot,
    read_log,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_main,
    start_ranks,
    wait_for_step,
    worker_pids,
)
from trainer import Trainer

TIMEOUT = 4
RESTART_HINT = "; start torchrun with --max_restarts=3 and it resumes by itself"


@pytest.mark.parametrize(
    ("lost_rank", "signal_name"),
    [
        (2, "SIGKILL"),
        pytest.param(0, "SIGKILL", marks=pytest.mark.slow),  # rank 0 hosts the store
        pytest.param(0, "SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_name_the_lost_one_in_time(lost_rank: int, signal_name: str, text: Path, tmp_path: Path) -> None:
    init_method = f"tcp://localhost:{free_port()}"
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1_000_000, distributed__timeout_seconds=TIMEOUT)
    results = run_ranks(
        3, _lose_a_rank, init_method, lost_rank, signal_name, argv, lost_rank=lost_rank, tmp_path=tmp_path
    )
    assert results.pop(lost_rank) is None
    for status, err, seconds in results:
        assert status == 1
        assert seconds < TIMEOUT + 5
        assert err.count("error: ") == 1, err
        assert f"rank {lost_rank}" in err.split("error: ")[1].split(", which")[0]
        assert all(f"rank {rank} (" not in err.split(", which")[0] for rank in {0, 1, 2} - {lost_rank})
    assert newest_snapshot(tmp_path / "run")["step"] >= 3


def _lose_a_rank(init_method: str, lost_rank: int, signal_name: str, argv: list[str]) -> tuple[int, str, float]:
    """One rank sends itself a signal before step 6. Returns status, stderr and the seconds since then."""
    train_step, started = Trainer.train_step, []

    def step_or_signal(trainer: Trainer) -> Any:
        if trainer.progress.step == 5:
            trainer.snapshots.writer.is_idle.wait()  # the test expects the snapshot of step 3
            started.append(time.monotonic())
            if trainer.context.rank == lost_rank:
                os.kill(os.getpid(), getattr(signal, signal_name))
        return train_step(trainer)

    Trainer.train_step = step_or_signal  # type: ignore[method-assign]
    health.ANSWER_SECONDS = 1.5  # type: ignore[attr-defined]  # limits a request, not the whole diagnosis
    os.environ["TEST_INIT_METHOD"] = init_method
    status, _, err = run_captured(*argv)
    return status, err, time.monotonic() - started[0]


@pytest.mark.slow
def test_a_rank_that_is_lost_while_it_encodes_the_text_is_named(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, distributed__timeout_seconds=TIMEOUT)
    lost, *others = run_ranks(3, _lose_the_rank_that_encodes, argv, lost_rank=0, tmp_path=tmp_path)
    assert lost is None
    for status, _, err in others:
        assert status == 1
        assert re.match(r"error: rank 0 \(.*\) sent no heartbeat", err), err


def _lose_the_rank_that_encodes(argv: list[str]) -> tuple[int, str, str]:
    def encode(*args: Any) -> None:
        time.sleep(TIMEOUT + 1)
        os.kill(os.getpid(), signal.SIGKILL)

    start.encode_corpus = encode  # type: ignore[assignment]
    return run_captured(*argv)


def test_the_exception_of_a_rank_is_reported_by_the_others(text: Path, tmp_path: Path) -> None:
    """Their advice depends on TORCHELASTIC_MAX_RESTARTS, which torchrun sets."""
    rank0, crashed, by_hand, rank3 = run_ranks(4, _crash, run_args(tmp_path / "run", text), tmp_path=tmp_path)
    assert crashed[0] == 1
    assert crashed[1].endswith("ZeroDivisionError: on purpose\n")
    for (status, err), hint in ((rank0, RESTART_HINT), (by_hand, "; the same command resumes"), (rank3, "")):
        assert status == 1
        assert err.startswith("error: rank 1 (")
        assert err.endswith(f"failed: ZeroDivisionError: on purpose{hint}\n")


def _crash(argv: list[str]) -> tuple[int, str]:
    """The second step of rank 1 raises."""
    train_step, restarts = Trainer.train_step, {"0": "0", "3": "3"}.get(os.environ["RANK"])

    def crash(trainer: Trainer) -> Any:
        if trainer.context.rank == 1 and trainer.progress.step == 1:
            raise ZeroDivisionError("on purpose")
        return train_step(trainer)

    Trainer.train_step = crash  # type: ignore[method-assign]
    if restarts is not None:
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = restarts
    status, _, err = run_captured(*argv)
    return status, err


@pytest.mark.parametrize("mistaken", [[1], [0, 1, 2]])
def test_a_mistake_is_reported_once_with_the_rank_if_only_one_rank_finds_it(
    mistaken: list[int], text: Path, tmp_path: Path
) -> None:
    results = run_ranks(3, _find_a_mistake, mistaken, run_args(tmp_path / "run", text), tmp_path=tmp_path)
    reporter, message = (1, "rank 1: no more paper") if mistaken == [1] else (0, "no more paper")
    assert [status for status, _ in results] == [2 if rank in mistaken else 1 for rank in range(3)]
    assert [err for _, err in results] == [f"error: {message}\n" if rank == reporter else "" for rank in range(3)]


def _find_a_mistake(mistaken: list[int], argv: list[str]) -> tuple[int, str]:
    """The second step raises a UserError on some of the ranks of a machine."""
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": "3"}
    train_step = Trainer.train_step

    def find(trainer: Trainer) -> Any:
        if trainer.context.rank in mistaken and trainer.progress.step == 1:
            raise UserError("no more paper")
        return train_step(trainer)

    Trainer.train_step = find  # type: ignore[method-assign]
    status, _, err = run_captured(*argv)
    return status, err


@pytest.mark.parametrize(
    ("scheme", "lost_rank", "fault", "grace_seconds", "message"),
    [
        ("file", 1, "exception", 0.5, r"rank 1 \(.*\) failed: ZeroDivisionError: on purpose"),
        pytest.param(
            "file", 1, "SIGKILL seen by NCCL", 0.5, r"rank 1 \(.*\) sent no heartbeat", marks=pytest.mark.slow
        ),
        pytest.param("file", 1, "SIGSTOP", 5, r"rank 1 \(.*\) sent no heartbeat for 2 seconds", marks=pytest.mark.slow),
        pytest.param("tcp", 0, "SIGSTOP", 5, r"rank 0, which hosts the store, is dead", marks=pytest.mark.slow),
    ],
)
def test_a_rank_whose_main_thread_is_blocked_names_the_lost_one(
    scheme: str, lost_rank: int, fault: str, grace_seconds: float, message: str, text: Path, tmp_path: Path
) -> None:
    """A sleep simulates a synchronization with a GPU, where NCCL's kernel waits for the lost rank."""
    init_method = {"tcp": f"tcp://localhost:{free_port()}", "file": f"file://{tmp_path}/store"}[scheme]
    argv = run_args(tmp_path / "run", text, distributed__init_method=init_method, distributed__timeout_seconds=TIMEOUT)
    faults = {1 - lost_rank: "sleep", lost_rank: fault}
    results = _run_main_with_faults(faults, grace_seconds, argv, tmp_path, 1 - lost_rank)
    status, err, seconds = results[1 - lost_rank]
    assert status == 1
    assert re.search(rf"^error: {message}.*; the same command resumes\n\Z", err, re.MULTILINE), err
    assert err.count("error: ") == 1, err
    assert seconds < (TIMEOUT if grace_seconds < 1 else TIMEOUT + 9)


@pytest.mark.slow
def test_a_rank_that_exits_later_than_the_others_does_not_miss_them(text: Path, tmp_path: Path) -> None:
    init_method = f"file://{tmp_path}/store"
    argv = run_args(tmp_path / "run", text, distributed__init_method=init_method, distributed__timeout_seconds=2)
    results = _run_main_with_faults({0: "slow exit"}, 0.1, argv, tmp_path, 0, 1)
    assert [(status, err) for status, err, _ in results] == [(0, "")] * 2


def test_a_rank_out_of_memory_says_so_at_once_and_the_others_name_it(text: Path, tmp_path: Path) -> None:
    """With nccl, destroying the process group waits for the other ranks (pytorch#196968)."""
    argv = run_args(tmp_path / "run", text, distributed__init_method=f"file://{tmp_path}/store")
    faults = {1: "out of memory"}
    (status, err, seconds), other = _run_main_with_faults(faults, 5, argv, tmp_path, 0, 1)
    assert status == 1
    assert re.fullmatch(r"error: rank 1 \(.*\) failed: OutOfMemoryError: on purpose; the same command resumes\n", err)
    assert seconds < 5
    status, err, seconds = other
    assert status == 2
    assert err.startswith("error: out of memory: on purpose; lower trainer.micro_batch_size")
    assert seconds < 1.5


def _run_main_with_faults(
    faults: dict[int, str], grace_seconds: float, argv: list[str], folder: Path, *awaited: int
) -> list[tuple[int, str, float]]:
    """Runs main.py on two ranks, and waits for some of them.

    Returns status, stderr, and the seconds from the first fault to the message of each rank.
    """
    processes, _ = start_ranks(2, _main_with_faults, faults, grace_seconds, argv, folder, tmp_path=folder)
    try:
        for rank in awaited:
            processes[rank].join(timeout=40)
        began = (folder / "fault").stat().st_mtime if (folder / "fault").exists() else 0.0
        files = [folder / f"stderr-{rank}" for rank in range(2)]
        return [
            (process.exitcode, read_log(file), file.stat().st_mtime - began)
            for process, file in zip(processes, files, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _main_with_faults(faults: dict[int, str], grace_seconds: float, argv: list[str], folder: Path) -> None:
    """Runs main.py. A rank in `faults` fails before step 6 or at its end."""
    rank, train_step = int(os.environ["RANK"]), Trainer.train_step
    end_collectives = DistributedContext.end_collectives

    def step_or_fail(trainer: Trainer) -> Any:
        if trainer.progress.step == 5 and rank in faults:
            fail(trainer.context.health.store, faults[rank])  # type: ignore[union-attr]
        return train_step(trainer)

    def fail(store: Any, fault: str) -> None:
        if fault == "sleep":
            time.sleep(1000)
        (folder / "fault").touch()
        if fault == "exception":
            raise ZeroDivisionError("on purpose")
        if fault == "out of memory":
            raise torch.OutOfMemoryError("on purpose")
        if fault == "SIGKILL seen by NCCL":
            store._underlying_non_prefix_store.set(health.NCCL_DUMP_KEY, "rank 0's watchdog")
        os.kill(os.getpid(), getattr(signal, fault.split(maxsplit=1)[0]))

    def end_and_sleep(context: DistributedContext) -> None:
        end_collectives(context)
        time.sleep(6)

    if faults.get(rank) == "slow exit":
        DistributedContext.end_collectives = end_and_sleep  # type: ignore[method-assign]
    else:
        Trainer.train_step = step_or_fail  # type: ignore[method-assign]
    health.GRACE_SECONDS = grace_seconds  # type: ignore[attr-defined]
    if "out of memory" in faults.values():
        dist.destroy_process_group = lambda: time.sleep(1000)
    main_process(argv, os.devnull, folder / f"stderr-{rank}")


def test_lost_ranks_are_named_and_one_rank_of_a_machine_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are threads. Two of 16 are lost."""
    world_size, lost = 16, (10, 11)
    store = dist.HashStore()
    infos = [RankInfo(rank, world_size, local_rank=rank) for rank in range(world_size)]
    monitors = [HealthMonitor(store, info, "rank 0", 600) for info in infos]
    errors: list[PeerError] = []

    def fail(rank: int) -> None:
        try:
            with explained_errors(monitors[rank]):
                raise RuntimeError("[gloo] Connection closed by peer")
        except PeerError as error:
            errors.append(error)

    threads = [threading.Thread(target=fail, args=[rank]) for rank in range(world_size) if rank not in lost]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = " and ".join(monitors[rank].name for rank in lost)
    assert {str(error).split(" seconds:")[0] for error in errors} == {f"{names} sent no heartbeat for 2"}
    assert [error.is_reported for error in errors].count(False) == 1

    # Rank 0 has ended with the store.
    monkeypatch.setattr(dist.Store, "compare_set", Mock(side_effect=RuntimeError("Connection reset by peer")))
    for cause, local_rank, is_reporter in (("", 1, True), ("rank 1", 1, False), ("rank 1", 0, True)):
        monitors[local_rank].cause = cause
        assert monitors[local_rank]._is_reporter() == is_reporter


def test_an_unreachable_store_is_named() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    health = HealthMonitor(dist.TCPStore("localhost", store.port, is_master=False), RankInfo(1, 2), "rank 0", TIMEOUT)
    del store
    with pytest.raises(
        StoreUnreachableError,
        match=r"^rank 0, which hosts the store, is dead, stopped or cut off from rank 1 \(",
    ):
        raise health.explain(RuntimeError("gloo"))
    health.stop()


@pytest.mark.slow
def test_workers_save_and_exit_when_torchrun_is_killed(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = run_args(run_dir, text, trainer__max_steps=1_000_000, trainer__save_every=100_000)
    with start_main(argv, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2") as agent:
        wait_for_step(run_dir, 5)
        workers = [Path(f"/proc/{pid}") for pid in worker_pids(agent.pid)]
        # With 0, workers advise to set --max_restarts.
        assert all("TORCHELASTIC_MAX_RESTARTS=0" in (worker / "environ").read_text().split("\0") for worker in workers)
        agent.kill()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(worker.exists() for worker in workers):
            time.sleep(0.05)
        assert not any(worker.exists() for worker in workers)
    assert newest_snapshot(run_dir)["step"] == read_rows(run_dir, "stop")[-1]["step"] == read_rows(run_dir)[-1]["step"]
