"""How is a run told to stop? By signals, or by its launcher's death."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import TracebackType

EXIT_STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}  # signal -> exit status
SECOND_INTERRUPT_SECONDS = (
    1.0  # seconds after which a second SIGINT is a person's, not the launcher passing on the first
)
POLL_SECONDS = 0.5  # seconds between looks at the launcher


class SignalHandler:
    """Within the context, notes signals that ask to stop, and does nothing else: ranks agree on the step to stop at.

    Attribute `signal` is the first one's number, or 0. Repeated ones change nothing; only a second SIGINT, at least a
    second after the first, leaves at once. Python runs handlers in the main thread alone, which may be waiting in a
    collective for a rank that never comes; so a thread reads signals from the pipe that the interpreter writes them to.

    torchrun's workers outlive it when it is killed, and the next start would meet them in its run folder: for them,
    their launcher's death is a SIGTERM.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.interrupted = 0.0
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def __enter__(self) -> SignalHandler:
        self.pipe, self.end = socket.socketpair()
        self.pipe.settimeout(POLL_SECONDS)
        self.end.setblocking(False)
        self.before = {number: signal.signal(number, lambda number, frame: None) for number in EXIT_STATUS}
        self.wakeup = signal.set_wakeup_fd(self.end.fileno(), warn_on_full_buffer=False)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """From here on, who was told to stop is deaf: the launcher repeats itself when others leave first.

        So is who fails under torchrun without restarts: it stops all at once, and they have yet to find out who is gone
        and to say so. With restarts, time is dearer than words.
        """
        deaf = self.signal or (error is not None and os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0")
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_IGN if deaf else handler)
        signal.set_wakeup_fd(self.wakeup)
        self.end.close()
        self.reader.join()
        self.pipe.close()

    def _read(self) -> None:
        while True:
            try:
                numbers = self.pipe.recv(64)
            except TimeoutError:
                if self.launcher is not None and os.getppid() != self.launcher:
                    self._note(signal.SIGTERM)
                continue
            if not numbers:
                return
            for number in numbers:
                self._note(number)

    def _note(self, number: int) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self.interrupted and now >= self.interrupted + SECOND_INTERRUPT_SECONDS:
                os._exit(EXIT_STATUS[signal.SIGINT])
            self.interrupted = self.interrupted or now
        if number in EXIT_STATUS:
            self.signal = self.signal or number
