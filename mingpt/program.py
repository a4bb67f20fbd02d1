"""From errors to exit statuses, for main.py and all other programs."""

import faulthandler
import gc
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mingpt.distributed.launcher import restart_hint
from mingpt.errors import PeerError, UserError, is_oom_error
from mingpt.monitoring.logging import configure_logging, logger
from mingpt.system.signals import is_interactive


def run_program(run: Callable[[Sequence[str]], int | None], argv: Sequence[str], encoding: str | None = None) -> int:
    """Calls `run` with the arguments of the command line, and returns the exit status.

    It is what `run` returns, 0 instead of None; 1 after a PeerError or a crash; 2 after a UserError or where memory ran
    out; 130 after Ctrl-C; and 0 if the reader of stdout has closed it, as `head` does.

    Args:
        encoding: that of stdout; None: the locale's
    """
    repair_inheritance()
    configure_logging()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is not
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")  # for paths that the terminal can't show
    with suppress(io.UnsupportedOperation):  # stderr is no file
        faulthandler.enable()  # gloo aborts the process if the sizes of a collective differ between ranks
    status = 0
    try:
        status = run(argv) or 0
    except SystemExit as ended:  # of argparse
        status = int(ended.code or 0)
    except UserError as error:
        status = 2
        if not error.is_reported:
            logger.error(str(error))
        write_error_file(str(error), f"error: {error}")
    except PeerError as error:
        status = 1
        if not error.is_reported:
            logger.error(f"{error}{restart_hint(os.environ)}")
        time.sleep(error.linger_seconds)
    except BrokenPipeError:  # the reader of stdout has enough
        pass
    except KeyboardInterrupt:  # before training, in which a signal handler is installed
        status = 130
    except Exception as error:
        if is_oom_error(error):
            status = 2
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.error(
                f"out of memory: {reason}; lower trainer.micro_batch_size, or set trainer.activation_checkpointing to "
                "full, or with several ranks distributed.strategy to fsdp; before the first step, raise the limits of "
                "this process (ulimit -v, ulimit -u)"
            )
        else:
            status = 1
            write_error_file(f"{type(error).__name__}: {error}", traceback.format_exc())
            with suppress(OSError):
                traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads it, or the disk is full; the interpreter's exit would try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pauses garbage collection while its block imports modules, which later collections do not look at either.

    PyTorch's modules make 465,000 objects. Collections that look at them take 0.5 of the 1.7 seconds of the imports,
    and 0.15 seconds each time in training (measured).
    """
    gc.collect()  # an earlier run in this process may have left garbage, which would remain
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def repair_inheritance() -> None:
    """Opens the null device in place of standard streams that are closed, and does not ignore SIGCHLD.

    A process inherits both from its parent, such as a daemon. The next file to be opened would get the descriptor of a
    closed stream, and what libraries write to that. Where SIGCHLD is ignored, the exit statuses of children are lost.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def write_error_file(message: str, call_stack: str) -> None:
    """Writes an error to torchrun's error file, as its `record` does, so that its summary, which comes last, shows it.

    The summary shows the call stack if there is one, else nothing of the message.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    details = {"py_callstack": call_stack, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def exit_process(status: int) -> None:
    """Ends the process without the interpreter's own exit.

    That would abort if it encountered a thread of PyTorch's C++ code, and would wait in the destructor of a process
    group that has failed. In a session, as by IPython's `%run`, this ends the program only.
    """
    if is_interactive():
        sys.exit(status)
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)
