"""The program's logger, which writes above the live line."""

import logging
import os
import stat
import sys
import time
from contextlib import suppress
from typing import Literal, TextIO

from tqdm import tqdm

from mingpt.monitoring.live_line import LiveLine

logger = logging.getLogger("mingpt")


class _TqdmHandler(logging.Handler):
    """Writes INFO of rank 0, and WARNING and ERROR of all ranks; on a terminal above the live line."""

    info_stream: Literal["stdout", "stderr"] = "stdout"
    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        # Streams are looked up here, since they may be redirected.
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            stream = sys.stderr
            message = f"{record.levelname.lower()}: {message}"
            if stream.isatty() and not LiveLine.is_active:
                message = f"\r\x1b[K{message}"  # overwrites another rank's live line, which is drawn again below
            is_file = _is_log_file(stream)
        else:
            stream = getattr(sys, self.info_stream)
            is_file = not stream.isatty()
        if is_file and self.info_stream == "stdout":
            message = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}"
        # A reader that has ended (`| head`), a full disk or a closed terminal must not end training.
        with suppress(OSError):
            tqdm.write(message, file=stream)
            stream.flush()


def _is_log_file(stream: TextIO) -> bool:
    """Whether stderr goes to a file, or to the same place as a stdout that is no terminal, as in `2>&1 | tee log`."""
    try:
        is_shared = os.path.sameopenfile(stream.fileno(), sys.stdout.fileno()) and not stream.isatty()
        return is_shared or stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or no file of the operating system
        return False


_handler = _TqdmHandler()
logger.addHandler(_handler)
logger.setLevel(logging.INFO)
logger.propagate = False


def configure_logging(info_stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Sends INFO to this stream, and WARNING and ERROR to stderr. It resets the rank to 0.

    If INFO goes to stdout, lines have date and time where stdout is no terminal, and where stderr is a file.
    """
    _handler.info_stream = info_stream
    _handler.rank = 0


def set_rank(rank: int) -> None:
    """Sets this process's rank: INFO is logged on rank 0 only."""
    _handler.rank = rank
