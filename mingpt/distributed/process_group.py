"""Connects ranks before main.py initializes the process group, attributes errors to ranks, and destroys the group."""

import errno
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from mingpt.config.schema import DistributedConfig
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.health import FILE_SYSTEM, RANK_0, HealthMonitor
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.network import (
    host_and_port,
    machine_id,
    resolve_init_method,
    select_gloo_interface,
    uses_agent_store,
)
from mingpt.distributed.rendezvous import all_equal, rendezvous
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger, set_reporter

WAIT_SECONDS = 2.0  # seconds until a rank logs that it is waiting for the others
AGENT_SECONDS = 0.5  # the end of torchrun's agent is noticed within this time


@contextmanager
def connected_ranks(info: RankInfo, config: DistributedConfig) -> Iterator[tuple[dist.Store, HealthMonitor | None]]:
    """Connects ranks at a store. The block initializes the process group with it.

    A single process gets a store in its memory, and no HealthMonitor.

    Raises:
        UserError: the other ranks did not connect to the store or to the process group.
    """
    rank = info.rank
    world_size = info.world_size
    if world_size == 1:
        yield dist.HashStore(), None
        return
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        # DETAIL wraps gloo in a backend that compares collectives. DDP's logger mistakes the wrapper for gloo and
        # crashes (torch 2.13: Logger::set_env_variables in logger.cpp).
        dist.set_debug_level(dist.DebugLevel.INFO)
        if rank == 0:
            logger.warning("TORCH_DISTRIBUTED_DEBUG is lowered from DETAIL to INFO, because DDP crashes with DETAIL")
    init_method = resolve_init_method(info, config.init_method)
    address = init_method
    if init_method == "env://":
        host, port = host_and_port(init_method)
        address += f" {host}:{port}"
    # A timer, because a TCPStore waits for rank 0 in C++. With torchrun, the agents wait for each other instead.
    message = f"rank {rank} is waiting for all {world_size} ranks to connect to {address}"
    notice = threading.Timer(WAIT_SECONDS, logger.warning, [message])
    if not info.local_rank and not uses_agent_store(init_method):  # one rank of each machine
        notice.start()
    try:
        store = rendezvous(init_method, rank, world_size, timedelta(seconds=config.timeout_seconds))
        notice.cancel()
        is_one_host = all_equal(dist.PrefixStore("machine", store), rank, world_size, machine_id())
        select_gloo_interface(is_one_host, init_method)
        store_host = RANK_0
        if init_method.startswith("file://"):
            store_host = FILE_SYSTEM
        elif uses_agent_store(init_method):
            store_host = "torchrun's agent"
        health = HealthMonitor(store, info, store_host)
        yield dist.PrefixStore("group", store), health
    except (ValueError, RuntimeError, OSError) as error:
        notice.cancel()
        if uses_agent_store(init_method):
            time.sleep(AGENT_SECONDS)  # if the agent has ended, `stop_with_torchrun` ends this process with its message
        set_reporter(True)  # other ranks may fail for other reasons
        advice = f"check that all {world_size} processes have started, and that this is rank 0's address"
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            advice = (
                "another run or program uses this port: choose a free one (MASTER_PORT or distributed.init_method), or "
                "let `torchrun --standalone` find one"
            )
        raise UserError(
            f"rank {rank} of {world_size} on {platform.node()} could not join a process group at {address} "
            f"(distributed.timeout_seconds is {config.timeout_seconds:g}): {error}; {advice}"
        ) from error


@contextmanager
def explained_errors(health: HealthMonitor | None) -> Iterator[None]:
    """Sends heartbeats while the block runs, and attributes an error of the block to the rank that has caused it.

    Raises:
        PeerError: another rank caused the block's error.
    """
    if health is None:
        yield
        return
    health.start()
    try:
        yield
    except Exception as error:
        explained = health.explain(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        health.stop()


def destroy_process_group() -> None:
    """Destroys the process group of this process, if there is one.

    Do not call it right after an error: NCCL would first wait for ranks that are dead or waiting (pytorch#196968), but
    this process must report the error and end. If the process continues, its next run destroys the group.
    """
    for callback in DistributedContext.exit_callbacks:
        callback()
    DistributedContext.exit_callbacks.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
