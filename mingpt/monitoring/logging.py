"""The program's logger: INFO of rank 0 goes to stdout, WARNING and ERROR of all ranks to stderr."""

import logging
import sys
import time
from contextlib import suppress
from threading import RLock
from typing import Any

from tqdm import tqdm

logger = logging.getLogger("mingpt")

# Arguments of tqdm for a bar that appears on a terminal after a second and is removed at the end.
BAR_OPTIONS: dict[str, Any] = {"unit_scale": True, "delay": 1, "disable": None, "leave": False}

# The default lock includes a semaphore of multiprocessing. Python 3.14 reports it as leaked after `exit_process`.
tqdm.set_lock(RLock())


class _Handler(logging.Handler):
    info_stream: str = "stdout"
    rank = 0
    is_reporter = True  # whether this process reports the error that ends it, or leaves that to another one

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        stream = getattr(sys, self.info_stream)  # which may be redirected at any time
        if record.levelno >= logging.WARNING:
            stream = sys.stderr
            message = f"{record.levelname.lower()}: {message}"
        elif self.info_stream == "stdout" and not stream.isatty():
            message = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}"
        # Training must not end because of a reader that has ended (`| head`), a full disk or a closed terminal.
        with suppress(OSError), tqdm.external_write_mode(stream):  # above a bar
            print(message, file=stream, flush=True)


handler = _Handler()
logger.addHandler(handler)
logger.setLevel(logging.INFO)
logger.propagate = False


def configure_logging(info_stream: str = "stdout") -> None:
    """Sends INFO to this stream, stdout or stderr. It also makes this process rank 0 and a reporter.

    Lines on stdout begin with date and time unless it is a terminal.
    """
    handler.info_stream = info_stream
    set_rank(0, None)


def set_rank(rank: int, local_rank: int | None) -> None:
    """Sets the rank of this process. Only rank 0 logs INFO, and local rank 0 of each machine reports a UserError.

    All ranks raise it (`shared_errors`). Rank 0 also reports it, since its local rank may have been set by hand to any
    number, and so does a process without a local rank, which was started by hand.
    """
    handler.rank = rank
    handler.is_reporter = rank == 0 or local_rank in (None, 0)
