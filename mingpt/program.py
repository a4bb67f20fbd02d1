"""Runs main.py and the other programs, and turns errors into messages and exit statuses."""

import faulthandler
import gc
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mingpt.errors import PeerError, UserError, is_oom_error
from mingpt.files import replace_file
from mingpt.monitoring.logging import configure_logging, is_reporter, logger
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
        if is_reporter():
            logger.error(str(error))
        status = 1
        if isinstance(error, UserError):  # torchrun's summary is about the rank that has caused a PeerError
            status = 2
            write_error_file(str(error), f"error: {error}")
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
        elif "no kernel image is available" in str(error):  # current builds lack kernels for the P100 and the V100
            status = 2
            logger.error(
                "this build of PyTorch has no kernels for this GPU; install one from "
                "https://download.pytorch.org/whl/cu126, or use the CPU: --distributed.backend gloo for main.py, "
                "--device cpu for sample.py"
            )
        else:
            status = 1
            write_error_file(f"{type(error).__name__}: {error}", traceback.format_exc())
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
        UserError: this version of PyTorch or its default dtype is not supported.
    """
    if "torch" not in sys.modules:
        # OpenMP would start fewer threads while other programs use the cores, and matrix products in bf16 would be
        # wrong (see `choose_threads`). It reads its variables when PyTorch is imported.
        os.environ["OMP_DYNAMIC"] = "false"
    gc.collect()  # otherwise, garbage of an earlier run in this process would never be collected
    gc.disable()
    try:
        from mingpt.system.torch_versions import check_torch  # noqa: PLC0415

        check_torch()
    finally:
        if not is_interactive():
            gc.freeze()
        gc.enable()


def write_error_file(message: str, call_stack: str) -> None:
    """Writes an error to torchrun's error file, like its `record` decorator, so that torchrun's summary shows it.

    The summary shows only the call stack, so UserErrors pass their message as the call stack.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    details = {"py_callstack": call_stack, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # torchrun, which may stop this process now, must not read an incomplete file
        replace_file(Path(file), json.dumps({"message": {"message": message, "extraInfo": details}}))


def exit_process(status: int) -> None:
    """Ends the process without finalizing the interpreter. In a session (IPython's `%run`), only the program ends.

    Finalization would abort the process if a thread of PyTorch's C++ code still runs, and it would wait in the
    destructor of a process group that has failed. A profiler, a debugger and `python -i` do their work after the
    program, so with them it ends like any other.
    """
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    tools = [sys.gettrace(), sys.getprofile(), *(monitoring.get_tool(i) for i in range(6) if monitoring)]
    if is_interactive() or sys.flags.inspect or any(tools):
        sys.exit(status)
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)
