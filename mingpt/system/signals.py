"""Stops a run after a signal, or when torchrun ends."""

import logging
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

logger = logging.getLogger("mingpt")  # `start_program` must not wait for an import of tqdm
# Exit status after each signal
EXIT_STATUS = {
    signal.SIGTERM: 143,
    signal.SIGUSR1: 143,
    signal.SIGUSR2: 143,
    signal.SIGHUP: 143,
    signal.SIGXCPU: 143,  # the soft limit of CPU time; at the hard limit, the system kills the process
    signal.SIGINT: 130,
}
SECOND_SIGNAL_SECONDS = 1.0  # an earlier second signal may be the launcher's copy of the first
POLL_SECONDS = 0.1  # time between checks of torchrun
PARENT = os.getppid()  # the launcher; getppid() changes when it dies


def is_interactive() -> bool:
    """Whether this process is a session of IPython, a notebook or Python, which continues after a run."""
    return hasattr(sys, "ps1")


def start_program() -> None:
    """Makes the program stop when torchrun ends, and end at once on Ctrl-C, unless it runs in a session.

    Call it before other imports. A KeyboardInterrupt would show their traceback, and NumPy turns it into other errors.

    The workers of torchrun continue if torchrun is killed. At the start, they would wait for its store until a timeout.
    Later, they would still lock the run folder at the next start. A thread polls, because PR_SET_PDEATHSIG exists on
    Linux only, and also signals the end of a thread of torchrun. If torchrun ends before this module is imported, the
    worker ends when it can't connect to the store.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_wait_for_torchrun, daemon=True).start()
    if not is_interactive() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))


def _wait_for_torchrun() -> None:
    while os.getppid() == PARENT:
        time.sleep(POLL_SECONDS)
    if os.environ.get("LOCAL_RANK") == "0":
        logger.error(f"torchrun, process {PARENT}, has ended, so its workers stop like after a SIGTERM")
    os.kill(os.getpid(), signal.SIGTERM)


class SignalHandler:
    """Records the first signal within the context. Ranks then agree on the step to stop at.

    A SIGINT at least one second after the first signal ends the process at once, but not a session. Python runs signal
    handlers when a call of C++ code returns.

    Closing the terminal sends SIGHUP; under `nohup`, it stays ignored.

    Attributes:
        signal: number of the first signal, or 0
    """

    def __init__(self) -> None:
        self.signal = 0
        self.received = 0.0  # time of the first signal

    def __enter__(self) -> "SignalHandler":
        self.old_handlers = {}
        if threading.current_thread() is threading.main_thread():  # other threads can't handle signals
            for number in EXIT_STATUS:
                # The parent of this process has had others ignored, such as nohup, or `&` in a script.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.old_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restores the signal handlers, or lets the process ignore signals until it ends: launchers repeat them.

        A rank that has lost another rank obeys a signal: torchrun names the dead rank in its summary, and waits for the
        other ranks before it starts new ones.
        """
        has_lost_rank = isinstance(error, RuntimeError)  # the class of all backends' errors
        ignore = self.signal != 0 and not has_lost_rank and not is_interactive()
        for number, handler in self.old_handlers.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)
        if has_lost_rank and self.signal:
            signal.raise_signal(self.signal)

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal == 0:
            self.signal = number
            self.received = now
        elif number == signal.SIGINT and now >= self.received + SECOND_SIGNAL_SECONDS and not is_interactive():
            os._exit(130)
