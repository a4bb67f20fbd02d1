"""Stops a run after a signal, or when torchrun ends."""

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from types import TracebackType

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
    if os.getpid() == 1:  # in a container, where the kernel discards signals that have no handler
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))
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

    Other signals end the process at once, but not a session:

    - while `exits_at_once` is set: any signal
    - at least one second after the first signal: SIGINT
    - at least one second after the first signal, while `is_waiting` is set: any signal

    Python runs signal handlers in the main thread only, which may be waiting in a collective for a dead rank, so a
    thread reads signals from the interpreter's wakeup fd.

    Closing the terminal sends SIGHUP; under `nohup`, it stays ignored.

    Attributes:
        signal: number of the first signal, or 0
        is_urgent: set by a signal that ends the process, unless it is a session
        exits_at_once: set until the first step ends, since compiling the model may take minutes
        is_waiting: set while ranks wait for a save or an upload, which may take long
    """

    def __init__(self) -> None:
        self.signal = 0
        self.is_urgent = False
        self.exits_at_once = False
        self.is_waiting = False
        self.received = math.inf  # time of the first signal

    def __enter__(self) -> "SignalHandler":
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.old_handlers = {}
        if threading.current_thread() is threading.main_thread():
            # The parent of this process has had others ignored, such as nohup, or `&` in a script.
            handled = [number for number in EXIT_STATUS if signal.getsignal(number) != signal.SIG_IGN]
            self.old_handlers = {number: signal.signal(number, lambda number, frame: None) for number in handled}
            self.old_fd = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        else:
            logger.warning("signals can't stop this run, because it is not in the main thread of its process")
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restores the signal handlers, or lets the process ignore signals until it ends.

        Signals are ignored after a stop, because launchers repeat them, and after an error under torchrun without
        restarts, because ranks still have to report it.

        torchrun with restarts names the dead rank in its summary, and waits for the other ranks before it starts new
        ones. There, a rank that has lost another rank obeys signals, even earlier ones.
        """
        max_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS")  # set by torchrun
        has_lost_rank = isinstance(error, RuntimeError)  # the class of all backends' errors
        ends_at_signal = has_lost_rank and max_restarts not in (None, "0")
        is_reporting = error is not None and max_restarts == "0"
        ignore = is_reporting or (self.signal != 0 and not ends_at_signal)
        for number, handler in self.old_handlers.items():
            signal.signal(number, signal.SIG_IGN if ignore and not is_interactive() else handler)
        if self.old_handlers:
            signal.set_wakeup_fd(self.old_fd)
        self.writer.close()
        self.thread.join()
        self.reader.close()
        if ends_at_signal and self.signal:
            signal.raise_signal(self.signal)

    def _read(self) -> None:
        while numbers := self.reader.recv(64):
            for number in numbers:
                self._record(number)

    def _record(self, number: int) -> None:
        if number in EXIT_STATUS:
            now = time.monotonic()
            is_second = now >= self.received + SECOND_SIGNAL_SECONDS
            self.received = min(self.received, now)
            exits = self.exits_at_once or (is_second and (self.is_waiting or number == signal.SIGINT))
            if exits and not is_interactive():
                os._exit(EXIT_STATUS[signal.Signals(number)])
            self.is_urgent = self.is_urgent or exits
            self.signal = self.signal or number
