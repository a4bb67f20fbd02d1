"""What surrounds the process group, which main.py initializes: how ranks connect, what their errors mean, the end."""

import errno
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from mingpt.config.schema import DistributedConfig
from mingpt.distributed.context import DistributedContext, extend_cuda_timeout
from mingpt.distributed.health import FILE_SYSTEM, HealthMonitor
from mingpt.distributed.launcher import (
    RankInfo,
    host_and_port,
    machine_id,
    resolve_init_method,
    select_gloo_interface,
    uses_agent_store,
)
from mingpt.distributed.rendezvous import first_different, rendezvous
from mingpt.errors import PeerError, UserError
from mingpt.monitoring.logging import logger

WAIT_SECONDS = 2.0  # for the other ranks, after which a rank says so


@contextmanager
def connected_ranks(
    info: RankInfo, config: DistributedConfig, run_dir: str, backend: str
) -> Iterator[tuple[dist.Store, HealthMonitor]]:
    """Connects ranks at a store. The block initializes the process group with it; then their heartbeats start.

    Args:
        run_dir: shared by all ranks, which rendezvous there if the launcher's address does not resolve
        backend: as `init_process_group` takes it

    Raises:
        UserError: the other ranks did not connect, to the store or to the process group, or have other backends.
    """
    rank = info.rank
    world_size = info.world_size
    init_method = resolve_init_method(info, config.init_method, run_dir)
    address = init_method
    if init_method == "env://":
        host, port = host_and_port(init_method)
        address += f" {host}:{port}"
    # In a thread, since a TCPStore waits in C++ for the one of rank 0. torchrun itself waits for its machines.
    message = f"rank {rank} waits until all {world_size} ranks are at {address}"
    notice = threading.Timer(WAIT_SECONDS, logger.warning, [message])
    if not info.local_rank and not uses_agent_store(init_method):  # one rank of each machine
        notice.start()
    try:
        store = rendezvous(init_method, rank, world_size, timedelta(seconds=config.timeout_seconds))
        notice.cancel()
        _check_backends(store, rank, world_size, backend)
        is_one_host = not first_different(dist.PrefixStore("host", store), rank, world_size, machine_id())
        select_gloo_interface(is_one_host, init_method)
        store_host = "rank 0"
        if init_method.startswith("file://"):
            store_host = FILE_SYSTEM
        elif uses_agent_store(init_method):
            store_host = "torchrun's agent"
        traces = _record_nccl(run_dir) if "nccl" in backend else ""
        health = HealthMonitor(store, rank, world_size, store_host, config.timeout_seconds, traces)
        yield dist.PrefixStore("group", store), health
        extend_cuda_timeout(dist.group.WORLD)  # type: ignore[arg-type]
        health.start()
    except (ValueError, RuntimeError, OSError) as error:
        notice.cancel()
        advice = f"are all {world_size} processes started, and does this address lead to the first one?"
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            advice = (
                "another run or program has this port: take a free one (MASTER_PORT or distributed.init_method), or "
                "let `torchrun --standalone` find one"
            )
        raise UserError(
            f"rank {rank} of {world_size} on {platform.node()} found no process group at {address} "
            f"(distributed.timeout_seconds is {config.timeout_seconds:g}): {error}; {advice}"
        ) from error


@contextmanager
def explained_errors(info: RankInfo, health: HealthMonitor | None) -> Iterator[None]:
    """Raises a PeerError in place of an error of the block whose cause is another rank, and ends the heartbeats.

    A UserError, which all ranks raise, is reported by rank 0; a PeerError by one rank of each machine.
    """
    try:
        yield
    except UserError as error:
        error.is_reported = error.is_reported or info.rank > 0
        raise
    except Exception as error:
        explained = health.explain(error) if health and not isinstance(error, PeerError) else error
        if health and isinstance(explained, PeerError):
            explained.is_reported = not health.is_reporter()
        if explained is error:
            raise
        raise explained from error
    finally:
        if health:
            health.stop()


def destroy_process_group() -> None:
    """Destroys the process group of this process, if there is one.

    Not right after an error: NCCL would first wait for ranks that are dead or wait themselves (pytorch#196968), while
    this process is about to report the error and to end. If it continues, its next run destroys the group.
    """
    for callback in DistributedContext.exit_callbacks:
        callback()
    DistributedContext.exit_callbacks.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _record_nccl(run_dir: str) -> str:
    """Turns on NCCL's flight recorder; returns the path of its dumps without the rank at their end.

    Variables of the environment are kept, also by their older names.
    """
    size = os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", size)  # 0 in torch 2.10
    path = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{run_dir}/nccl_trace_rank_")
    return os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", path)


def _check_backends(store: dist.Store, rank: int, world_size: int, backend: str) -> None:
    """Compares what ranks have chosen: one whose GPU's driver is broken chooses gloo, and would wait for the others.

    Raises:
        UserError: they differ; rank 0 reports it.
    """
    different = first_different(dist.PrefixStore("backend", store), rank, world_size, backend)
    if different:
        store.set(f"backend/choice/{rank}", f"{backend} on rank {rank} ({platform.node()})")
        choices = store.multi_get(["backend/choice/0", f"backend/choice/{different}"])
        # Together, since rank 0 may host the store, and torchrun ends rank 0 once another has failed.
        with suppress(RuntimeError, OSError):
            first_different(dist.PrefixStore("received", store), rank, world_size, "")
        raise UserError(
            f"the backend differs between ranks: {b', '.join(choices).decode()}; PyTorch sees no GPU where it is gloo: "
            "check the driver there with nvidia-smi, or train on the CPU everywhere with --distributed.backend gloo",
            is_reported=rank > 0,
        )
