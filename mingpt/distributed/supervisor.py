"""The parent of a trainer with distributed.survive: starts it again when a signal has ended it.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

PID, TOKEN, JOINED_FD = "MINGPT_SUPERVISOR_PID", "MINGPT_SUPERVISOR_TOKEN", "MINGPT_JOINED_FD"
RESTART_STATUS = 75  # of a trainer that asks to be started again, as no process is left that has the state
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # forwarded
MAX_FAILURES = 5  # trainers in a row that end by a signal before they have joined
MAX_DELAY = 8.0  # seconds between them
STOPPED_SECONDS = 60.0  # after which a stopped trainer is ended, so that another can take its place
POLL_SECONDS = 0.02  # between looks at the trainer and the launcher


def is_supervised(env: Mapping[str, str]) -> bool:
    """Whether this process is a trainer that a supervisor has started."""
    return PID in env


def become_supervisor() -> NoReturn:
    """Replaces this process by a supervisor that runs the same command."""
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, "-I", str(Path(__file__).resolve()), *command])  # noqa: S606


def report_joined() -> None:
    """Tells the supervisor that this trainer has become a member."""
    os.write(int(os.environ[JOINED_FD]), b"x")


def report(message: str) -> None:
    """Writes a line to stderr, on a terminal over another rank's live line, which is drawn again below."""
    print(f"\r\x1b[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


class Supervisor:
    """Runs a command until it ends by itself, or a signal is to stop it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped_by = 0
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.token = uuid.uuid4().hex
        self.joined, self.joined_writer = os.pipe()
        os.set_blocking(self.joined, False)
        for number in SIGNALS:
            signal.signal(number, self._forward)

    def run(self) -> int:
        """Returns the exit status: the trainer's, or 128 + the signal that ended it."""
        failures = 0
        while True:
            status = self._run_once()
            if status >= 0 and status != RESTART_STATUS:
                return status
            if self.stopped_by:
                return 128 + self.stopped_by
            failures = 0 if self._has_joined() else failures + 1
            name = signal.Signals(-status).name if status < 0 else "the loss of all others"
            rank = os.environ.get("RANK", "0")
            if failures == MAX_FAILURES:
                report(
                    f"error: rank {rank}: its process was ended by {name}, {failures} times in a row before it had "
                    "joined the others; the same command resumes"
                )
                return 128 - status if status < 0 else status
            report(f"warning: rank {rank}: its process was ended by {name}: starting another")
            self._sleep(min(MAX_DELAY, 2.0 ** (failures - 1)) if failures else 0.0)

    def _run_once(self) -> int:
        env = {**os.environ, PID: str(os.getpid()), TOKEN: self.token, JOINED_FD: str(self.joined_writer)}
        self.child = subprocess.Popen(self.command, env=env, pass_fds=[self.joined_writer])  # noqa: S603
        if self.stopped_by:  # while it was started
            self.child.send_signal(self.stopped_by)
        stopped_at = math.inf
        while True:
            pid, status = os.waitpid(self.child.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                self.child.returncode = os.waitstatus_to_exitcode(status)
                return self.child.returncode
            if pid:
                stopped_at = time.monotonic() if os.WIFSTOPPED(status) else math.inf
            if time.monotonic() > stopped_at + STOPPED_SECONDS:
                self.child.kill()
            if self.launcher not in (None, os.getppid()):
                self.launcher = None
                self._forward(signal.SIGTERM, None)
            time.sleep(POLL_SECONDS)

    def _has_joined(self) -> bool:
        try:
            return bool(os.read(self.joined, 1 << 16))
        except BlockingIOError:
            return False

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stopped_by:
            time.sleep(0.05)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or number
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(number)
            self.child.send_signal(signal.SIGCONT)  # a stopped process would not end


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1:]).run())
