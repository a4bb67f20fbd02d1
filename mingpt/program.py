"""Runs main.py and the other programs, and turns errors into messages and exit statuses."""

import faulthandler
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from mingpt.errors import PeerError, UserError, is_oom_error
from mingpt.monitoring.logging import configure_logging, handler, logger
from mingpt.system.signals import is_interactive


def run_program(run: Callable[[Sequence[str]], int | None], argv: Sequence[str], encoding: str | None = None) -> int:
    """Calls `run` with the arguments of the command line and returns the exit status.

    The status is the return value of `run`, or 0 for None. It is 1 after a PeerError or a crash, 2 after a UserError or
    when memory ran out, 130 after Ctrl-C, and 0 if the reader of stdout closed it, like `head`.

    Args:
        encoding: encoding of stdout; None: the locale's encoding
    """
    configure_logging()
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")  # some paths can't be encoded
    with suppress(io.UnsupportedOperation):  # stderr may be a text buffer
        faulthandler.enable()  # gloo aborts the process if the sizes of a collective differ between ranks
    status = 0
    try:
        status = run(argv) or 0
    except SystemExit as ended:  # from argparse
        status = int(ended.code or 0)
    except (UserError, PeerError) as error:
        if handler.is_reporter:
            logger.error(str(error))
        status = 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:  # the reader of stdout closed it
        pass
    except KeyboardInterrupt:  # only before training, which installs a signal handler
        status = 130
    except Exception as error:
        if is_oom_error(error):
            status = 2
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.error(
                "out of memory: lower trainer.micro_batch_size, set trainer.activation_checkpointing to full or "
                "trainer.cuda_graphs to false, or use distributed.strategy fsdp on several ranks. If the first step "
                "has not begun, raise the limits of this process (ulimit -v, ulimit -u). If a library can't be mapped, "
                "its folder may be mounted noexec. PyTorch's message: "
                f"{reason}"
            )
        else:
            status = 1
            with suppress(OSError):
                traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:  # no reader, or a full disk; without dup2, the interpreter would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def import_pytorch() -> None:
    """Imports PyTorch without garbage collection, and excludes its objects from later collections.

    In a session, which has objects of its own, later collections include everything.

    The modules of PyTorch create 465,000 objects. Collections that traverse them take 0.5 of the 1.7 seconds of the
    imports, and 0.15 seconds each during training (measured).

    Raises:
        UserError: this version of PyTorch is not supported.
    """
    # Matrix products in bf16 are wrong if OpenMP starts fewer threads than PyTorch asks for (PyTorch 2.13, oneDNN: of
    # 120 gradients, 86 were not finite, and 34 were finite but wrong by more than 5 percent). OpenMP reads these when
    # PyTorch is imported.
    os.environ["OMP_DYNAMIC"] = "false"
    os.environ.pop("OMP_THREAD_LIMIT", None)
    gc.disable()
    from mingpt.system.torch_versions import check_torch  # noqa: PLC0415

    if not is_interactive():
        gc.freeze()
    gc.enable()
    check_torch()


def exit_process(status: int) -> None:
    """Ends the process without finalizing the interpreter. In a session (IPython's `%run`), only the program ends.

    Finalization would abort the process if a thread of PyTorch's C++ code still runs, and it would wait in the
    destructor of a process group that has failed. A profiler and a debugger do their work after the program.
    """
    if is_interactive() or sys.gettrace() or sys.getprofile():
        sys.exit(status)
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)
