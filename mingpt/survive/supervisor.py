"""The parent of a trainer with distributed.survive: starts it again when a signal or an error has ended it.

    python supervisor.py COMMAND...

The launcher sees this process only, which does nothing that could fail, and imports nothing but the standard library.
"""

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NoReturn

TOKEN = "MINGPT_SUPERVISOR_TOKEN"  # noqa: S105 - no password; set in trainers that a supervisor has started
REPORT_FD = "MINGPT_REPORT_FD"
LAUNCHER_PID = "MINGPT_LAUNCHER_PID"  # as in mingpt/signals.py
# What a trainer reports:
TRAINED = b"t"  # it has finished a step
FAILED = b"f"  # the run has failed, for all ranks
RESTART_STATUS = 75  # of a trainer that must start again, since no process is left that has the state of the run
FINAL_STATUSES = (0, 2, 128 + signal.SIGTERM, 128 + signal.SIGINT)  # of a trainer that is not started again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # forwarded
MAX_FAILURES = 5  # trainers of a rank that end before any of them has finished a step
MAX_DELAY = 30.0  # seconds between trainers that end without a finished step
STOPPED_SECONDS = 60.0  # after which a stopped trainer is ended, so that another can take its place
POLL_SECONDS = 0.02  # between looks at the trainer and the launcher


def become_supervisor() -> NoReturn:
    """Replaces this process by a supervisor that runs the same command."""
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, "-I", str(Path(__file__).resolve()), *command])  # noqa: S606


@cache
def tell_supervisor(what: bytes) -> None:
    """Reports to the supervisor, once, that this trainer has TRAINED, or that the run has FAILED."""
    os.write(int(os.environ[REPORT_FD]), what)


def describe(status: int) -> str:
    """What has ended a process with this status."""
    if status < 0:
        number = -status
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return "the loss of all others" if status == RESTART_STATUS else f"an error (status {status})"


def report(message: str) -> None:
    """Writes a line to stderr, on a terminal over another rank's live line, which is drawn again below."""
    with suppress(OSError):  # its reader has closed it
        print(f"\r\x1b[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


class Supervisor:
    """Runs a command until it ends with a final status, or a signal is to stop it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped_by = 0
        launcher = os.environ.get(LAUNCHER_PID)  # torchrun, or launch/by_hand.py; others end their processes themselves
        self.launcher = int(launcher) if launcher else None
        self.token = uuid.uuid4().hex
        self.reports, self.reports_writer = os.pipe()
        os.set_blocking(self.reports, False)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
                signal.signal(number, self._forward)

    def run(self) -> int:
        """Returns the exit status: the trainer's, or 128 + the signal that ended it.

        Once a trainer of this rank has finished a step, the other ranks continue without it. So another one is started,
        however many have ended. Before that, the other ranks may wait for this one.
        """
        failures = 0  # trainers in a row that ended without a finished step
        has_trained = False
        while True:
            status = self._run_once()
            reports = self._read_reports()
            exit_status = status if status >= 0 else 128 - status
            if status in FINAL_STATUSES or FAILED in reports:
                return exit_status
            if self.stopped_by:
                return 128 + self.stopped_by
            failures += 1
            if TRAINED in reports:
                failures = 0
                has_trained = True
            ended = f"rank {os.environ.get('RANK', '0')}: its process was ended by {describe(status)}"
            if failures == MAX_FAILURES and not has_trained:
                report(f"error: {ended}, {failures} times before it had finished a step; the same command resumes")
                return exit_status
            delay = min(MAX_DELAY, 2.0 ** (failures - 1)) if failures else 0.0
            pause = f" in {delay:g} s, after {failures} without a finished step" if failures else ""
            report(f"warning: {ended}: starting another{pause}")
            self._sleep(delay)

    def _run_once(self) -> int:
        env = {**os.environ, LAUNCHER_PID: str(os.getpid()), TOKEN: self.token, REPORT_FD: str(self.reports_writer)}
        self.child = subprocess.Popen(self.command, env=env, pass_fds=[self.reports_writer])  # noqa: S603
        if self.stopped_by:  # while it was started
            self._send(self.stopped_by)
        stopped_at = math.inf
        while True:
            pid, status = os.waitpid(self.child.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                self.child.returncode = os.waitstatus_to_exitcode(status)
                return self.child.returncode
            if pid:
                stopped_at = time.monotonic() if os.WIFSTOPPED(status) else math.inf
            if time.monotonic() > stopped_at + STOPPED_SECONDS:
                self._send(signal.SIGKILL)
            self._look_at_launcher()
            time.sleep(POLL_SECONDS)

    def _read_reports(self) -> bytes:
        try:
            return os.read(self.reports, 1 << 16)
        except BlockingIOError:
            return b""

    def _look_at_launcher(self) -> None:
        if self.launcher not in (None, os.getppid()):
            self.launcher = None
            self._forward(signal.SIGTERM, None)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stopped_by:
            self._look_at_launcher()
            time.sleep(POLL_SECONDS)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        self._send(number)
        self._send(signal.SIGCONT)  # a stopped process would not end

    def _send(self, number: int) -> None:
        """Sends a signal to the trainer, if there is one.

        Not by Popen.send_signal, which waits for a child that has just ended: `os.waitpid` would fail then.
        """
        if self.child is not None and self.child.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.child.pid, number)


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1:]).run())
