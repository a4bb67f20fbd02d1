"""Threads whose start fails instead of waiting forever where memory is short."""

import _thread
import threading
from collections.abc import Callable

START_SECONDS = 5.0


class DaemonThread:
    """A daemon thread that has started when its constructor returns.

    `threading.Thread.start` waits without a timeout for the new thread to set an event, and hangs if that thread ends
    before it with a MemoryError (python/cpython#140746).

    Raises:
        RuntimeError: the thread can't be started.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.started = threading.Event()
        self.ended = threading.Event()
        _thread.start_new_thread(self._run, ())
        if not self.started.wait(START_SECONDS):
            raise RuntimeError("can't start new thread: it has ended at once, probably without memory")

    def join(self, seconds: float | None = None) -> None:
        """Waits for the end of the thread, at most so long."""
        self.ended.wait(seconds)

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def _run(self) -> None:
        try:
            self.started.set()
            self.run()
        finally:
            self.ended.set()
