"""Runs for faults: main.py in separate processes, which tests find, signal and start again."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mingpt.monitoring.run_log import iter_metrics
from tests.helpers import ROOT, TORCHRUN, assert_equal_snapshots, clean_env, loss_curve, read_rows

TIMEOUT = 150  # seconds to start, to stop or to reach a step; each takes ten


class Run:
    """A run folder, and the processes that train into it. At the end of a `with` block they are killed.

    Args:
        run_dir: its output goes to a file next to it
        argv: the command line of main.py
        cwd: the working directory of all processes; by default, this process's

    Attributes, which `update` sets:
        reached: the newest step
        starts: number of times that training has begun
        lost_steps: number of steps that each start had to repeat
        lost_seconds: duration of these steps
    """

    def __init__(self, run_dir: Path, argv: Sequence[str], cwd: Path | None = None) -> None:
        self.run_dir = run_dir
        self.cwd = cwd
        self.argv = argv
        self.log = run_dir.with_suffix(".log")
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen] = []
        self.reached, self.starts, self.started_at = 0, 0, 0.0
        self.step_times: dict[int, float] = {}
        self.lost_steps: list[int] = []
        self.lost_seconds: list[float] = []

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self, *launcher: str, **env: str | None) -> None:
        """Starts `python LAUNCHER main.py ARGV`."""
        command = [sys.executable, *launcher, str(ROOT / "main.py"), *self.argv]
        env["FAULTS_RUN"] = self.mark
        with self.log.open("a") as log:
            # In a separate session, since on Ctrl-C the caller ends its processes itself.
            options: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": self.cwd, "start_new_session": True}
            self.processes.append(subprocess.Popen(command, env=clean_env(**env), **options))

    def start_torchrun(self, world_size: int, *options: str, **env: str) -> None:
        self.start(*TORCHRUN, f"--nproc_per_node={world_size}", *options, **env)

    def pids(self) -> dict[int, str]:
        """All processes of this run, orphans too: each with its LOCAL_RANK or an empty string."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or belongs to another user
                env = process.environ()
                if env.get("FAULTS_RUN") == self.mark:
                    found[process.pid] = env.get("LOCAL_RANK", "")
        return found

    def ranks(self) -> list[int]:
        """Process ids by rank: torchrun's workers, or else the processes that were started and still run."""
        pids = self.pids()
        workers = sorted(filter(pids.get, pids), key=pids.__getitem__)
        return workers or [process.pid for process in self.processes if process.poll() is None]

    def rows(self, *events: str) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl with these events so far."""
        with suppress(FileNotFoundError):
            rows = iter_metrics(self.run_dir / "metrics.jsonl")
            return [row for row in rows if row["event"] in events]
        return []

    def update(self) -> int:
        """Reads the progress of a run that logs every step; returns how often training has begun."""
        for row in self.rows("start", "train"):
            if row["event"] == "train":
                self.reached = max(self.reached, row["step"])
                self.step_times[row["step"]] = row["time"]
            elif row["time"] > self.started_at:
                self.lost_steps.append(self.reached - row["step"])
                # A start that has made no step has lost no work.
                began = max(self.started_at, self.step_times.get(row["step"], 0.0))
                ended = max(began, self.step_times.get(self.reached, 0.0))
                self.lost_seconds.append(ended - began)
                self.started_at, self.starts = row["time"], self.starts + 1
                self.reached = row["step"]
        return self.starts

    def output(self) -> str:
        """The end of the output."""
        return self.log.read_text(errors="replace")[-6000:]

    def wait(self, condition: Callable[[], bool], name: str, may_exit: bool = False) -> None:
        """Waits for a condition that comes true in time, and before the newest process has ended.

        Raises:
            AssertionError: it does not
        """
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            status = self.processes[-1].poll()
            if status is not None and not may_exit and not condition():
                raise AssertionError(f"{name}: not before the end with status {status}\n{self.output()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{name}: not within {TIMEOUT} s\n{self.output()}")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: any(row["step"] >= step for row in self.rows("train")), f"step {step}")

    def wait_for_save(self) -> bool:
        """Waits for a snapshot that is being written, without a pause, since that takes only milliseconds."""
        folder, deadline = self.run_dir / "snapshots", time.monotonic() + 3
        leftovers = set(folder.glob("*.tmp"))
        while time.monotonic() < deadline:
            if not leftovers.issuperset(folder.glob("*.tmp")):
                return True
        return False

    def finish(self) -> list[int]:
        """Waits until all processes have ended; returns their exit statuses."""
        return [process.wait(TIMEOUT) for process in self.processes]

    def kill(self) -> None:
        """Kills all processes at once, like a loss of power."""
        while pids := self.pids():
            for pid in pids:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)
        for process in self.processes:
            process.wait()


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def assert_same_run(undisturbed: Path, run_dir: Path) -> None:
    """Both have ended with the same bits, and each has logged each step once, with the same losses.

    The validation loss of the last step is left out: a run that a signal has stopped has none.
    """
    assert_equal_snapshots(undisturbed, run_dir)
    expected, found = (_curves(folder) for folder in (undisturbed, run_dir))
    assert expected == found, "losses differ"


def _curves(run_dir: Path) -> list[list[tuple[int, float]]]:
    losses = loss_curve(run_dir)
    evaluations = [(row["step"], row["val_loss"]) for row in read_rows(run_dir, "eval")]
    return [losses, [each for each in evaluations if each[0] < losses[-1][0]]]
