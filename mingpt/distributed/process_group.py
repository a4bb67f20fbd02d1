"""Connects ranks before main.py initializes the process group, attributes errors to ranks, and destroys the group."""

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from mingpt.config.schema import DistributedConfig
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.health import RANK_0, HealthMonitor
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.rendezvous import rendezvous, resolve_init_method, select_gloo_interface, uses_agent_store
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger, set_reporter

WAIT_SECONDS = 2.0  # seconds until a rank logs that it is waiting for the others


@contextmanager
def connected_ranks(info: RankInfo, config: DistributedConfig) -> Iterator[tuple[dist.Store, HealthMonitor | None]]:
    """Connects ranks at a store. The block initializes the process group with it.

    A single process gets a store in its memory, and no HealthMonitor.

    Raises:
        UserError: the other ranks did not connect to the store or to the process group.
    """
    if info.world_size == 1:
        yield dist.HashStore(), None
        return
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        # DETAIL wraps gloo in a backend that compares collectives. DDP's logger mistakes the wrapper for gloo and
        # crashes (torch 2.13: Logger::set_env_variables in logger.cpp).
        dist.set_debug_level(dist.DebugLevel.INFO)
    init_method = resolve_init_method(info, config.init_method)
    place = f"all {info.world_size} ranks to connect to {init_method}"
    # A timer, because a TCPStore waits for rank 0 in C++. With torchrun, the agents wait for each other instead.
    notice = threading.Timer(WAIT_SECONDS, logger.warning, [f"rank {info.rank} is waiting for {place}"])
    if not info.local_rank and not uses_agent_store(init_method):  # one rank of each machine
        notice.start()
    try:
        timeout = timedelta(seconds=config.timeout_seconds)
        store, is_one_host = rendezvous(init_method, info.rank, info.world_size, timeout)
        notice.cancel()
        select_gloo_interface(is_one_host, init_method)
        store_host = "torchrun's agent" if uses_agent_store(init_method) else RANK_0
        yield dist.PrefixStore("group", store), HealthMonitor(store, info, store_host)
    except (ValueError, RuntimeError, OSError) as error:
        notice.cancel()
        set_reporter(True)  # other ranks may fail for other reasons
        raise UserError(
            f"rank {info.rank} of {info.world_size} on {platform.node()} could not join a process group at "
            f"{init_method} (distributed.timeout_seconds is {config.timeout_seconds:g}): {error}; check that all "
            "processes have started, that this is rank 0's address, and that no other run or program uses its port"
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
