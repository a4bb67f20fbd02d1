"""The program's logger. It writes above the live line."""

import logging
import os
import shutil
import stat
import sys
import time
from contextlib import suppress
from typing import Literal, TextIO

from tqdm import tqdm

logger = logging.getLogger("mingpt")


class _TqdmHandler(logging.Handler):
    """Writes INFO of rank 0, and WARNING and ERROR of all ranks, above the live line if there is one."""

    info_stream: Literal["stdout", "stderr"] = "stdout"
    rank = 0
    is_reporter = True

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        # Streams may be redirected at any time.
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            stream = sys.stderr
            message = f"{record.levelname.lower()}: {message}"
            if stream.isatty():
                # Overwrites another rank's live line, which is redrawn below. Not all terminals know escape codes.
                message = f"\r{' ' * (shutil.get_terminal_size().columns - 1)}\r{message}"
            is_file = _is_log_file(stream)
        else:
            stream = getattr(sys, self.info_stream)
            is_file = not stream.isatty()
        if is_file and self.info_stream == "stdout":
            message = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}"
        # Training must not end because of a reader that has ended (`| head`), a full disk or a closed terminal.
        with suppress(OSError):
            tqdm.write(message, file=stream)
            stream.flush()


def _is_log_file(stream: TextIO) -> bool:
    """Returns whether stderr goes to a file, or to the same pipe as stdout, as in `2>&1 | tee log`."""
    try:
        is_shared = os.path.sameopenfile(stream.fileno(), sys.stdout.fileno()) and not stream.isatty()
        return is_shared or stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or not a file of the operating system
        return False


_handler = _TqdmHandler()
logger.addHandler(_handler)
logger.setLevel(logging.INFO)
logger.propagate = False


def configure_logging(info_stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Sends INFO to this stream, and WARNING and ERROR to stderr. It also makes this process rank 0 and a reporter.

    If INFO goes to stdout, lines begin with date and time unless stdout is a terminal, and on stderr if it is a file.
    """
    _handler.info_stream = info_stream
    set_rank(0, None)


def set_rank(rank: int, local_rank: int | None) -> None:
    """Sets the rank of this process. Only rank 0 logs INFO, and local rank 0 of each machine reports a UserError.

    All ranks raise it (`shared_errors`). Rank 0 also reports it, since its local rank may have been set by hand to any
    number, and so does a process without a local rank, which was started by hand.
    """
    _handler.rank = rank
    _handler.is_reporter = rank == 0 or local_rank in (None, 0)


def set_reporter(is_reporter: bool) -> None:
    """Makes this process report its error, which not all ranks have, or leave that to another process."""
    _handler.is_reporter = is_reporter


def is_reporter() -> bool:
    return _handler.is_reporter
