"""A background thread for saves, which ends with its owner."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

EXIT_WAIT_SECONDS = 5.0  # how long a run that fails waits for a snapshot that is being written or uploaded


class SaveResult(NamedTuple):
    """The outcome of a save.

    Attributes:
        header: the snapshot without its tensors
        error: why the save has failed; None: it has succeeded
    """

    header: dict[str, Any]
    error: Exception | None

    @property
    def is_scheduled(self) -> bool:
        """Whether trainer.save_every asked for it, or it ended the run."""
        return self.header["step"] in self.header["scheduled"]


class Worker:
    """A thread that handles snapshots, one at a time.

    It starts before the first one, because starting it during a step would delay the step until it gets the GIL.
    """

    def __init__(self) -> None:
        self.results: deque[SaveResult] = deque()  # of saves that have ended, until the caller takes them
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.newest: Future[Any] = self.executor.submit(dict)  # the newest request; this one starts the thread

    def submit(self, snapshot: dict[str, Any]) -> None:
        self.newest = self.executor.submit(self.handle, snapshot)

    def handle(self, snapshot: dict[str, Any]) -> None:
        """Handles a request in the thread, and adds its result."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all requests are handled. Returns whether they are."""
        return self.newest in wait([self.newest], timeout).done

    def close(self) -> None:
        """Ends the thread after the current request, and waits some seconds for that."""
        self.executor.shutdown(wait=self.wait(EXIT_WAIT_SECONDS), cancel_futures=True)
