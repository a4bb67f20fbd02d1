"""What main.py needs for its process group: it connects ranks, names those that have caused an error, and cleans up."""

import faulthandler
import os
import platform
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

from mingpt.config.schema import Config
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.rendezvous import rendezvous, resolve_init_method, select_gloo_interface, uses_agent_store
from mingpt.errors import UserError
from mingpt.monitoring.logging import handler, logger

WAIT_SECONDS = 2.0  # seconds until a rank logs that it is waiting for the others
ERROR_SECONDS = 2.0  # all ranks that are alive get an error within this time after the first one
GLOO_ERRORS = ("gloo", "application timeout")  # in a RuntimeError; the second one follows a collective that timed out
ANSWER_SECONDS = 5.0  # how long the store's answers may take


def connect(config: Config, info: RankInfo) -> dist.Store:
    """Returns the store of the ranks of this start; raises a UserError if they did not connect."""
    init_method = resolve_init_method(info, config.distributed.init_method)
    seconds = config.distributed.timeout_seconds
    # A timer, because a TCPStore waits for rank 0 in C++. With torchrun, the agents wait for each other instead.
    message = f"rank {info.rank} is waiting for all {info.world_size} ranks to connect to {init_method}"
    notice = threading.Timer(WAIT_SECONDS, logger.warning, [message])
    if not info.local_rank and not uses_agent_store(init_method):  # one rank of each machine
        notice.start()
    try:
        store, is_one_host = rendezvous(init_method, info.rank, info.world_size, timedelta(seconds=seconds))
        select_gloo_interface(is_one_host, init_method)
        return store
    except (ValueError, RuntimeError, OSError) as error:
        handler.is_reporter = True  # other ranks may fail for other reasons
        raise UserError(
            f"rank {info.rank} of {info.world_size} on {platform.node()} could not join a process group at "
            f"{init_method} (distributed.timeout_seconds is {seconds:g}): {error}; check that all processes have "
            "started, that this is rank 0's address, and that no other run or program uses its port"
        ) from error
    finally:
        notice.cancel()


def explain(store: dist.Store, info: RankInfo, error: Exception) -> str:
    """Returns which ranks have caused an error; empty: it is this rank's own.

    Soon after a collective has failed on one rank, all ranks have an error, except for those that are dead or hang. The
    first rank of each machine that has one reports the cause.
    """
    is_backend_error = isinstance(error, dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in GLOO_ERRORS)
    )
    summary = "" if is_backend_error else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    cause = f"rank 0 has ended, or does not answer: {error}"

    handler.is_reporter = is_backend_error or handler.is_reporter  # each rank, unless the store answers

    def find_cause() -> None:
        nonlocal cause
        with suppress(RuntimeError, OSError):  # the store has ended
            store.set(f"error/{info.rank}", summary)
            if is_backend_error:
                _close_connections(store)
                cause = _find_cause(store, info, error)
                if info.rank == 0:  # it may host the store, which other ranks read a moment later
                    time.sleep(ERROR_SECONDS)

    thread = threading.Thread(target=find_cause, daemon=True)  # a request to a stopped process blocks forever
    thread.start()
    thread.join(2 * ERROR_SECONDS + ANSWER_SECONDS)
    return cause if is_backend_error else ""


def _find_cause(store: dist.Store, info: RankInfo, error: Exception) -> str:
    if not store.check(["cause"]):  # the error may be the consequence of another one
        time.sleep(ERROR_SECONDS)
        ranks = range(info.world_size)
        errors = {rank: store.get(f"error/{rank}").decode() for rank in ranks if store.check([f"error/{rank}"])}
        silent = [str(rank) for rank in ranks if rank not in errors]
        failed = [f"rank {rank} failed: {other}" for rank, other in errors.items() if other]
        missing = f"rank {', '.join(silent)}: dead, stopped, cut off or hanging, or waiting for such a rank"
        store.compare_set("cause", "", "; ".join(failed) or (missing if silent else str(error)))
    of_machine = range(info.rank - (info.local_rank or 0), info.rank)
    handler.is_reporter = not any(store.check([f"error/{rank}"]) for rank in of_machine)
    return store.get("cause").decode()


def _close_connections(store: dist.Store) -> None:
    """Closes the connections to other ranks, so that ranks which wait for this one fail as well.

    Only the neighbors of a dead rank in gloo's rings fail at once. gloo closes connections when the process ends, but
    not when a group is aborted or destroyed (torch 2.13).

    Args:
        store: its connections stay open
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    port = getattr(store, "port", None)  # a file does not have one
    for connection in psutil.Process().net_connections("tcp"):
        ports = [address.port for address in (connection.laddr, connection.raddr) if address]
        if connection.status == psutil.CONN_ESTABLISHED and port not in ports:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as copy:
                copy.shutdown(socket.SHUT_RDWR)


def destroy_process_group() -> None:
    """Destroys the process group of this process, if there is one.

    Do not call it right after an error: NCCL would first wait for ranks that are dead or waiting (pytorch#196968), but
    this process must report the error and end. If the process continues, its next run destroys the group.
    """
    for callback in DistributedContext.exit_callbacks:
        callback()
    DistributedContext.exit_callbacks.clear()
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()
