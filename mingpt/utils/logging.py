"""The program's logger, which writes above the live line, and the exit status of scripts."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from tqdm import tqdm

from mingpt.utils.errors import PeerError, UserError
from mingpt.utils.progress import ProgressLine

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
            if stream.isatty() and not ProgressLine.is_active:
                message = f"\r\x1b[K{message}"  # overwrites another rank's live line, which is drawn again below
        else:
            stream = getattr(sys, self.info_stream)
            if self.info_stream == "stdout" and not stream.isatty():
                message = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}"
        # A reader that has ended (`| head`), a full disk or a closed terminal must not end training.
        with suppress(OSError):
            tqdm.write(message, file=stream)
            stream.flush()


_handler = _TqdmHandler()


def configure_logging(info_stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Sends INFO to this stream, with date and time if it is stdout and no terminal; WARNING and ERROR to stderr.

    It resets the rank to 0.
    """
    _handler.info_stream = info_stream
    _handler.rank = 0
    logger.addHandler(_handler)  # once, however often this is called
    logger.setLevel(logging.INFO)
    logger.propagate = False


def set_rank(rank: int) -> None:
    """Sets this process's rank: INFO is logged on rank 0 only."""
    _handler.rank = rank


def report_peer_error(error: PeerError, hint: str = "") -> None:
    """Logs it with this hint, and waits as long as other ranks may still need this process."""
    logger.error(f"{error}{hint}")
    time.sleep(error.linger_seconds)


def run_script(run: Callable[[Sequence[str]], None]) -> int:
    """Calls `run` with the command line's arguments and returns the exit status.

    It is 0, also if the reader of stdout has closed it, as `head` does; 1 after a PeerError; 2 after a UserError; 130
    after Ctrl-C.
    """
    configure_logging()
    try:
        run(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        logger.error(str(error))
        return 2
    except PeerError as error:
        report_peer_error(error)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0
