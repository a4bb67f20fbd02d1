"""After a signal, ranks save and exit together, whichever process gets it and however often it is sent."""

import os
import pty
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

import main
from mingpt.snapshot.folder import SnapshotFolder
from mingpt.system.signals import EXIT_STATUS, SignalHandler, start_program
from tests.faults.runs import Run
from tests.helpers import read_rows, run_args, run_program, run_ranks, train_main, wait_until
from tests.inside import call_before, newest_snapshot
from trainer import Trainer

ENDLESS = {"trainer__max_steps": 1_000_000, "trainer__save_every": 1_000_000}


def get_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in EXIT_STATUS}


@pytest.mark.parametrize("is_session", [False, True])
def test_the_first_signal_is_recorded_and_later_ones_are_ignored(
    is_session: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers_before = get_handlers()
    with suppress(ValueError), SignalHandler():
        raise ValueError
    assert get_handlers() == handlers_before  # there was no signal
    if is_session:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
        monkeypatch.setattr("mingpt.system.signals.SECOND_SIGNAL_SECONDS", 0.01)
    with SignalHandler() as signals:
        assert signals.signal == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: signals.signal != 0, "the first signal", timeout=10)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):  # torchrun forwards a Ctrl-C to its workers
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        assert signals.signal == signal.SIGUSR1
    assert get_handlers() == (handlers_before if is_session else dict.fromkeys(EXIT_STATUS, signal.SIG_IGN))


def test_signals_that_the_parent_has_had_ignored_stay_ignored() -> None:
    """SIGHUP by nohup, SIGINT by `&` in a script."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with SignalHandler():
        start_program()
        assert {signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)} == {signal.SIG_IGN}


FAILING = """
import os, time
from contextlib import suppress
from mingpt.system.signals import SignalHandler
with suppress(RuntimeError), SignalHandler() as signals:
    os.kill(os.getpid(), 15)
    while not signals.signal:
        time.sleep(0.01)
    raise {error}("Connection closed by peer")
time.sleep(0.5)  # the time to find the dead rank
"""


@pytest.mark.parametrize(("error", "status"), [("RuntimeError", -15), ("ValueError", 1)])
def test_a_rank_that_torchrun_stops_before_a_collective_fails_ends(error: str, status: int) -> None:
    done = run_program("-c", FAILING.format(error=error))
    assert done.returncode == status, done.stderr
    assert ("ValueError: Connection closed" in done.stderr) == (status == 1)


@pytest.mark.parametrize("library", ["_pydantic_core", "numpy/_core"])
def test_an_interrupt_while_modules_are_imported_ends_the_program_without_a_traceback(
    library: str, tmp_path: Path
) -> None:
    with Run(tmp_path / "run", []) as run:
        run.start()
        maps = Path(f"/proc/{run.processes[0].pid}/maps")
        wait_until(lambda: library in maps.read_text(), "the import")
        run.processes[0].send_signal(signal.SIGINT)
        assert run.finish() == [130]
        assert run.output() == ""


def test_a_closed_terminal_stops_the_run_and_saves(text: Path, tmp_path: Path) -> None:
    """The run gets a SIGHUP, and can no longer write its lines."""
    run_dir = tmp_path / "run"
    master, slave = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, main.__file__, *run_args(run_dir, text, **ENDLESS)]
    with Popen(command, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        printed = b""
        while b"loss" not in printed:  # a line of the log
            printed += os.read(master, 65536)
        os.close(master)
        assert process.wait(60) == 143
    stop = read_rows(run_dir, "stop")[-1]
    assert stop["signal"] == "SIGHUP"
    assert newest_snapshot(run_dir)["step"] == stop["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to_launcher", "name", "recorded", "max_restarts"),
    [
        (True, "SIGTERM", "SIGTERM", 3),
        (True, "SIGINT", "SIGINT", 0),
        (True, "SIGUSR1", "SIGTERM", 0),  # ends torchrun without a handler; its workers treat that as a SIGTERM
        (False, "SIGXCPU", "SIGXCPU", 0),
    ],
)
def test_a_signal_to_torchrun_or_its_workers_stops_the_run_and_saves(
    to_launcher: bool, name: str, recorded: str, max_restarts: int, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with Run(run_dir, run_args(run_dir, text, **ENDLESS)) as run:
        run.start_torchrun(2, f"--max_restarts={max_restarts}")
        run.wait_for_step(5)
        for pid in [run.processes[0].pid] if to_launcher else run.ranks():
            os.kill(pid, getattr(signal, name))
        wait_until(lambda: not run.pids(), "the workers have ended")
    stop = read_rows(run_dir, "stop")[-1]
    assert newest_snapshot(run_dir)["step"] == stop["step"] == read_rows(run_dir)[-1]["step"]
    assert stop["signal"] == recorded


def test_no_rank_exits_before_the_snapshot_is_complete(text: Path, tmp_path: Path) -> None:
    """Writing takes longer than the timeout of collectives, and a launcher repeats the signal while ranks wait."""
    argv = run_args(tmp_path / "run", text, distributed__timeout_seconds=1.5, **ENDLESS)
    results = run_ranks(3, stop_with_a_slow_disk, *argv, tmp_path=tmp_path)
    [snapshot] = (tmp_path / "run/snapshots").glob("step_*")
    assert newest_snapshot(tmp_path / "run")["step"] == int(snapshot.stem.removeprefix("step_"))
    for status, exited_at in results:
        assert status == 143
        assert 0 <= exited_at - snapshot.stat().st_ctime < 2


def stop_with_a_slow_disk(*argv: str) -> tuple[int, float]:
    """For `run_ranks`: sends SIGTERM to each rank many times; returns the exit status and the time of the exit."""

    def send_signals() -> None:
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    def start_signals(trainer: Trainer) -> None:
        if trainer.progress.step == 2:
            threading.Thread(target=send_signals, daemon=True).start()

    call_before(SnapshotFolder, "write", lambda *_: time.sleep(2))
    call_before(Trainer, "train_step", start_signals)
    return train_main(*argv), time.time()


@pytest.mark.slow
def test_workers_end_with_one_message_if_torchrun_is_killed_at_their_start(text: Path, tmp_path: Path) -> None:
    """Its store ends with it, and they would wait for the store until a timeout."""
    with Run(tmp_path / "run", run_args(tmp_path / "run", text, **ENDLESS)) as run:
        run.start_torchrun(2)
        run.wait(lambda: len(run.ranks()) == 2, "two workers")
        maps = [Path(f"/proc/{pid}/maps") for pid in run.ranks()]
        run.wait(lambda: all("libtorch" in file.read_text() for file in maps), "libtorch")
        run.processes[0].kill()
        wait_until(lambda: not run.pids(), "the workers have ended", timeout=10)
    assert run.output().count("error: ") == 1
    assert f"error: torchrun, process {run.processes[0].pid}, has ended" in run.output()
    assert "frame #" not in run.output()
