"""Told to stop: ranks save and leave together, whoever is run_captured, however often, and whatever writes."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers import newest_snapshot, read_rows, run_args, run_ranks, start_main, train_main, wait_for_step, worker_pids

from mingpt.utils.signals import SECOND_INTERRUPT_SECONDS, SignalHandler
from trainer import Trainer

ENDLESS = {"trainer__max_steps": 1_000_000, "trainer__save_every": 1_000_000}


def test_the_first_signal_counts_and_repeats_change_nothing() -> None:
    with SignalHandler() as stop:
        assert stop.signal == 0
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        _wait_until(lambda: stop.signal == signal.SIGUSR1)
        time.sleep(0.05)
        assert stop.signal == signal.SIGUSR1
    try:
        os.kill(os.getpid(), signal.SIGTERM)  # after a stop the process is deaf
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_without_a_stop_everything_is_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), threading.active_count()
    with SignalHandler():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), threading.active_count()) == before


def _wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_two_quick_interrupts_are_one(text: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches workers twice: from the terminal, and passed on by torchrun."""
    with start_main(run_args(tmp_path / "run", text, **ENDLESS)) as process:
        wait_for_step(tmp_path / "run", 5)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert process.wait(60) == 130
    assert newest_snapshot(tmp_path / "run")["step"] == read_rows(tmp_path / "run", "stop")[-1]["step"]


@pytest.mark.slow
def test_interrupted_twice_a_run_that_waits_for_a_stopped_peer_ends(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, distributed__init_method=f"file://{tmp_path}/meeting", **ENDLESS)
    with ExitStack() as stack:
        processes = [stack.enter_context(start_main(argv, RANK=str(rank), WORLD_SIZE="2")) for rank in range(2)]
        wait_for_step(tmp_path / "run", 5)
        processes[1].send_signal(signal.SIGSTOP)
        processes[0].send_signal(signal.SIGINT)
        time.sleep(SECOND_INTERRUPT_SECONDS + 0.2)
        processes[0].send_signal(signal.SIGINT)
        assert processes[0].wait(5) == 130
        processes[1].kill()


@pytest.mark.slow  # test_main_job_under_torchrun has one
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("whom", ["launcher", "workers"])
def test_a_stop_under_torchrun_saves_whoever_is_told(name: str, whom: str, text: Path, tmp_path: Path) -> None:
    """torchrun dies of SIGUSR1, for which it has no handler, and its workers take its death for a SIGTERM."""
    run, number = tmp_path / "run", getattr(signal, name)
    with start_main(
        run_args(run, text, **ENDLESS), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    ) as p:
        wait_for_step(run, 5)
        for pid in [p.pid] if whom == "launcher" else worker_pids(p.pid):
            os.kill(pid, number)
        p.communicate(timeout=60)
    stop = read_rows(run, "stop")[-1]
    assert newest_snapshot(run)["step"] == stop["step"] == read_rows(run)[-1]["step"]
    assert stop["signal"] == ("SIGTERM" if (whom, name) == ("launcher", "SIGUSR1") else name)


def test_no_rank_leaves_before_the_file_is_whole(text: Path, tmp_path: Path) -> None:
    """A slow disk: writing takes longer than the timeout of collectives, and the stop is repeated meanwhile."""
    argv = run_args(tmp_path / "run", text, distributed__timeout_seconds=2, **ENDLESS)
    results = run_ranks(3, _stopped_on_a_slow_disk, *argv, tmp_path=tmp_path)
    assert [status for status, _ in results] == [143] * 3
    whole = (tmp_path / "run/snapshots" / f"step_{newest_snapshot(tmp_path / 'run')['step']:08d}.pt").stat().st_ctime
    for _, left in results:
        assert 0 <= left - whole < 2


def _stopped_on_a_slow_disk(*argv: str) -> tuple[int, float]:
    from mingpt.snapshot import storage

    write, step = storage.SnapshotStorage.write, Trainer.train_step

    def slowly(*args):
        time.sleep(3)
        return write(*args)

    def stop() -> None:
        for _ in range(12):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    def stopped(trainer: Trainer) -> Any:
        if trainer.state.step == 2:
            threading.Thread(target=stop, daemon=True).start()
        return step(trainer)

    storage.SnapshotStorage.write = slowly
    Trainer.train_step = stopped
    return train_main(*argv), time.time()
