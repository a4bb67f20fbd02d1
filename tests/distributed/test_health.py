"""When a rank fails, the others name it and exit in time. When the launcher is killed, no process is left."""

import os
import platform
import re
import signal
import time
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mingpt.distributed import health
from mingpt.distributed.agreement import all_gather_object
from mingpt.distributed.health import HealthMonitor
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.process_group import explained_errors
from mingpt.errors import PeerError, UserError
from tests.helpers import (
    free_port,
    newest_snapshot,
    open_process_group,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_main,
    wait_for_step,
    wait_until,
    worker_pids,
)
from trainer import Trainer

TIMEOUT = 4
HINTS = ("; start torchrun with --max_restarts=3 and it resumes by itself", "; the same command resumes", "")


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
            trainer.snapshots.newest_write.result()  # the test expects the snapshot of step 3
            started.append(time.monotonic())
            if trainer.context.rank == lost_rank:
                os.kill(os.getpid(), getattr(signal, signal_name))
        return train_step(trainer)

    Trainer.train_step = step_or_signal  # type: ignore[method-assign]
    health.ANSWER_SECONDS = 1.5  # type: ignore[attr-defined]  # limits a request, not the whole diagnosis
    os.environ["TEST_INIT_METHOD"] = init_method
    status, _, err = run_captured(*argv)
    return status, err, time.monotonic() - started[0]


def test_ranks_wait_at_the_start_for_one_that_is_alive(tmp_path: Path) -> None:
    lost, *others = run_ranks(3, _work_and_die, tmp_path=tmp_path, lost_rank=0)
    assert lost is None
    for message in others:
        assert re.match(r"rank 0 \(.*\) sent no heartbeat for 2 seconds: .*, last seen in .*test_health.py:", message)


def _work_and_die() -> str:
    """Rank 0 works for longer than the timeout, and is killed after the exchange."""
    try:
        with open_process_group(timeout_seconds=1) as context:
            time.sleep(1.5 if context.rank == 0 else 0)
            all_gather_object(context, None)
            if context.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            all_gather_object(context, None)
    except PeerError as error:
        return str(error)
    return "no error"


def test_the_timeout_begins_with_the_second_step(tmp_path: Path) -> None:
    """The first step may compile the model, and ranks may take different times for that."""
    message, _ = run_ranks(2, _compile_and_hang, tmp_path=tmp_path)
    assert re.match(r"all 2 ranks are alive; .*; rank 1: in _compile_and_hang at .*test_health.py:", message)


def _compile_and_hang() -> str:
    """Rank 1 takes longer than the timeout in two steps."""
    try:
        with open_process_group(timeout_seconds=1) as context:
            subgroup = context.subgroup([[0, 1]])
            for _ in range(2):
                flags = context.begin_step(0, False, 0)
                time.sleep(2.5 * context.rank)
                subgroup.all_reduce(torch.zeros(1))
                flags.wait()
    except PeerError as error:
        return str(error)
    return "no error"


def test_the_exception_of_a_rank_is_reported_by_the_others(text: Path, tmp_path: Path) -> None:
    """Their advice depends on TORCHELASTIC_MAX_RESTARTS, which torchrun sets."""
    envs = [{"TORCHELASTIC_MAX_RESTARTS": "0"}, {}, {}, {"TORCHELASTIC_MAX_RESTARTS": "3"}]
    errors, argv = {1: ZeroDivisionError("on purpose")}, run_args(tmp_path / "run", text)
    results = run_ranks(4, _raise_errors, errors, envs, argv, tmp_path=tmp_path)
    assert [status for status, _ in results] == [1] * 4
    patterns = [rf"error: rank 1 \(.*failed: ZeroDivisionError: on purpose{hint}\n" for hint in HINTS]
    patterns.insert(1, r"(?s).*\nZeroDivisionError: on purpose\n")
    for (_, err), pattern in zip(results, patterns, strict=True):
        assert re.fullmatch(pattern, err)


@pytest.mark.parametrize("mistaken", [[1], [0, 1, 2]])
def test_a_mistake_is_reported_once_and_with_the_rank_if_only_one_rank_finds_it(
    mistaken: list[int], text: Path, tmp_path: Path
) -> None:
    envs = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"} for rank in range(3)]
    errors, argv = dict.fromkeys(mistaken, UserError("no more paper")), run_args(tmp_path / "run", text)
    results = run_ranks(3, _raise_errors, errors, envs, argv, tmp_path=tmp_path)
    assert [status for status, _ in results] == [2 if rank in mistaken else 1 for rank in range(3)]
    message = r"rank 1 \(.*failed: UserError: no more paper; the same command resumes"
    if mistaken != [1]:
        message = "no more paper"
        assert results[0][1] != ""
    assert re.fullmatch(f"error: {message}\n", "".join(err for _, err in results))


def _raise_errors(errors: dict[int, Exception], envs: list[dict[str, str]], argv: list[str]) -> tuple[int, str]:
    """Sets an environment for each rank. The second step of some ranks raises an error."""
    rank, train_step = int(os.environ["RANK"]), Trainer.train_step
    os.environ.update(envs[rank])

    def step_or_raise(trainer: Trainer) -> Any:
        if rank in errors and trainer.progress.step == 1:
            # With nccl, it would wait for the other ranks (pytorch#196968).
            dist.destroy_process_group = lambda: time.sleep(1000)
            raise errors[rank]
        return train_step(trainer)

    Trainer.train_step = step_or_raise  # type: ignore[method-assign]
    status, _, err = run_captured(*argv)
    return status, err


@pytest.fixture
def reporters(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets an item for each rank that has an error: whether it reports the error."""
    calls: list[bool] = []
    monkeypatch.setattr(health, "set_reporter", calls.append)
    monkeypatch.setattr(health, "HEARTBEAT_INTERVAL", 0.1)
    monkeypatch.setattr(health, "HEARTBEAT_TIMEOUT", 1.0)
    monkeypatch.setattr(health, "LINGER_SECONDS", 0.0)
    return calls


def fail_together(world_size: int, lost: Sequence[int], message: str) -> list[Exception]:
    """Lets the ranks of one machine, which are threads, get an error at the same time, after `lost` ranks are dead."""
    store = dist.HashStore()
    monitors = [HealthMonitor(store, RankInfo(rank, world_size, rank), "rank 0") for rank in range(world_size)]

    def fail(monitor: HealthMonitor) -> Exception:
        try:
            with explained_errors(monitor):
                time.sleep(0.3)
                raise RuntimeError(message)
        except (PeerError, RuntimeError) as error:
            return error

    with futures.ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(fail, [monitor for rank, monitor in enumerate(monitors) if rank not in lost]))


def test_lost_ranks_are_named_and_one_rank_of_a_machine_reports_them(reporters: list[bool]) -> None:
    errors = fail_together(16, (10, 11), "[gloo] Connection closed by peer")
    names = [f"rank {rank} ({platform.node()}, process {os.getpid()})" for rank in (10, 11)]
    assert {str(error).split(" seconds:")[0] for error in errors} == {f"{' and '.join(names)} sent no heartbeat for 1"}
    assert sorted(reporters) == [False] * 13 + [True]


@pytest.mark.usefixtures("reporters")
def test_the_number_of_requests_per_rank_does_not_grow_with_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither while ranks train, nor when all of them fail. The store of n ranks would get n^2 requests."""
    requests: list[int] = []  # number of keys in each of them
    for name in ("set", "get", "multi_get", "check", "compare_set"):
        request = getattr(dist.Store, name)

        def counted(store: dist.Store, keys: Any, *args: Any, request: Any = request) -> Any:
            requests.append(len(keys) if isinstance(keys, list) else 1)
            return request(store, keys, *args)

        monkeypatch.setattr(dist.Store, name, counted)
    per_rank = []
    for world_size in (2, 32):
        requests.clear()
        errors = fail_together(world_size, (), "[gloo] Timed out")
        assert all(str(error).startswith(f"all {world_size} ranks are alive; ranks 0, 1") for error in errors)
        per_rank.append(sum(requests) / world_size)
    assert per_rank[1] < 1.5 * per_rank[0], per_rank


def test_an_unreachable_store_is_named() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    health = HealthMonitor(dist.TCPStore("localhost", store.port, is_master=False), RankInfo(1, 2), "rank 0")
    del store
    with pytest.raises(PeerError, match=r"^rank 0, which hosts the store, is dead, stopped or cut off from rank 1 \("):
        raise health.explain(RuntimeError("gloo"))


def test_ranks_know_the_cause_after_rank_0_has_ended_with_the_store(reporters: list[bool]) -> None:
    """A rank that exchanges nothing with the lost rank gets its error from the ranks that do, when they have ended."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", store.port, is_master=False)
    monitors = [HealthMonitor(client, RankInfo(rank, 4, rank - 1), "rank 0") for rank in (1, 2)]  # of one machine
    for monitor in monitors:
        monitor.start()
    dist.PrefixStore("health", store).set("cause", "rank 3 is dead")
    wait_until(lambda: all(monitor.cause for monitor in monitors), "both have read the cause", timeout=10)
    del store
    for monitor in monitors:
        assert str(monitor.explain(RuntimeError("gloo"))).startswith("rank 3 is dead")
        monitor.stop()
    assert reporters == [True, False]


def test_rank_0_ends_later_than_the_ranks_that_read_its_store() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", store.port, is_master=False)
    host = HealthMonitor(store, RankInfo(0, 3, 0), "rank 0")
    other = HealthMonitor(client, RankInfo(1, 3, 1), "rank 0")
    dist.PrefixStore("health", store).set("cause", "rank 2 is dead")
    with futures.ThreadPoolExecutor(1) as pool:
        explained = pool.submit(host.explain, RuntimeError("gloo"))
        time.sleep(0.5)
        assert str(other.explain(RuntimeError("gloo"))).startswith("rank 2 is dead")
        assert not explained.done()
        assert str(explained.result()).startswith("rank 2 is dead")


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
        wait_until(lambda: not any(worker.exists() for worker in workers), "the workers have ended", timeout=20)
    assert newest_snapshot(run_dir)["step"] == read_rows(run_dir, "stop")[-1]["step"] == read_rows(run_dir)[-1]["step"]
