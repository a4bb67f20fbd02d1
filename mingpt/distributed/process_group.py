"""The process group, and the collectives on it that training uses.

A single process needs no process group: every method then does the local equivalent.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.config import DistributedConfig
from mingpt.distributed.health import HealthMonitor, rendezvous, uses_agent_store
from mingpt.distributed.launch_environment import (
    RankInfo,
    detect_launch_environment,
    resolve_init_method,
    select_gloo_interface,
)
from mingpt.utils.device import choose_device, use_cuda, visible_gpu_uuids
from mingpt.utils.errors import StoreUnreachableError, UserError
from mingpt.utils.logging import set_rank

T = TypeVar("T")


class DistributedContext:
    """This process's rank and device, and collectives with the other ranks.

    Args:
        rank_info: what the launcher tells
        health: heartbeats of all ranks; None for a single process
        timeout: of collectives in subgroups
    """

    def __init__(
        self, rank_info: RankInfo, health: HealthMonitor | None = None, timeout: timedelta | None = None
    ) -> None:
        self.rank, self.world_size, self.health, self.timeout = rank_info.rank, rank_info.world_size, health, timeout
        self.group: dist.ProcessGroup | None = None  # None: all ranks
        self.exit_callbacks: list[Callable[[], None]] = []  # called before the process group is destroyed
        host, hosts = platform.node(), self.all_gather_object(platform.node())
        self.local_rank = hosts[: self.rank].count(host) if rank_info.local_rank is None else rank_info.local_rank
        self.local_world_size = rank_info.local_world_size or hosts.count(host)
        self.device = torch.device("cpu")

    def subgroup(self, groups: Iterable[Sequence[int]]) -> DistributedContext:
        """Returns the context of the group of ranks that has this rank; all ranks must list the same groups."""
        context = copy(self)
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=self.timeout)
            if self.rank in ranks:
                context.rank, context.world_size, context.group = ranks.index(self.rank), len(ranks), group
        return context

    def init_device(self, backend: str) -> None:
        """Sets `device` to this rank's GPU or the CPU.

        Raises:
            UserError: there are fewer GPUs than processes on some host, on every rank.
        """
        host, gpus = platform.node(), self.raise_on_all_ranks(lambda: visible_gpu_uuids(backend))
        others = self.all_gather_object((host, gpus))
        others.pop(self.rank)
        # srun may assign GPUs: each process then sees only its own, as number 0.
        exclusive = not any(other_host == host and set(uuids) & set(gpus) for other_host, uuids in others)
        local_rank, local_size = (0, 1) if gpus and exclusive else (self.local_rank, self.local_world_size)
        self.device = self.raise_on_all_ranks(lambda: choose_device(backend, local_rank, local_size, self.world_size))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def backend(self) -> str:
        """Name of the backend that reduces gradients."""
        if self.world_size == 1:
            return "none, one process"
        return "nccl" if self.device.type == "cuda" else "gloo"

    def all_gather_object(self, value: T) -> list[T]:
        """Returns each rank's value, in rank order."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Returns the source rank's value."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, group_src=source, group=self.group)
        return values[0]

    def raise_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank and returns its result.

        Raises:
            UserError: of the first rank that failed, on every rank.
        """
        result, error = None, None
        try:
            result = action()
        except UserError as raised:
            error = str(raised)
        errors = self.all_gather_object(error)
        for rank, message in enumerate(errors):
            if message is not None:
                raise UserError(f"rank {rank}: {message}" if rank else message)
        return result  # type: ignore[return-value]

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and returns its result on all ranks; a UserError is raised on all ranks."""
        return self.broadcast_object(self.raise_on_all_ranks(action if self.rank == 0 else lambda: None))  # type: ignore[return-value]

    def local_rank0_first(self, action: Callable[[], T]) -> T:
        """Runs `action` on one rank of each file system before the other ranks, for which it should be quick.

        Rank 0 is first, then local rank 0 of each host, which finds the work done if the file system is shared.
        """
        self.raise_on_all_ranks(lambda: action() if self.rank == 0 else None)
        self.raise_on_all_ranks(lambda: action() if self.local_rank == 0 else None)
        return self.raise_on_all_ranks(action)

    def check_equal(self, values: Mapping[str, Any]) -> None:
        """Checks that all ranks pass the same values.

        Raises:
            UserError: one differs; the message has rank, name and both values.
        """
        first, *others = self.all_gather_object(dict(values))
        for rank, other in enumerate(others, start=1):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise UserError(
                        f"{name} differs between ranks: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}; "
                        "start all of them with the same code, text, yaml and options"
                    )

    def shard_range(self, first: int, count: int, rank: int | None = None) -> range:
        """Returns a rank's shard of [first, first + count), by default this rank's; sizes differ by at most one."""
        rank = self.rank if rank is None else rank
        return range(first + count * rank // self.world_size, first + count * (rank + 1) // self.world_size)

    def max_shard_size(self, count: int) -> int:
        """Returns the size of the largest shard of `count` samples."""
        return -(-count // self.world_size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Overwrites the tensor with the source rank's."""
        if self.world_size > 1:
            dist.broadcast(tensor, group_src=source, group=self.group)

    def all_reduce_max_async(self, *values: int) -> Callable[[], list[int]]:
        """Starts to reduce each value to its maximum over all ranks; returns a function that waits for the result.

        Ranks call it at the same step, so all of them see at the same step that one received a signal. The tensor is
        on the CPU and reduced by gloo, so it does not wait for work on a GPU.
        """
        tensor = torch.tensor(values, dtype=torch.int32)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True) if self.world_size > 1 else None

        def wait() -> list[int]:
            if work is not None:
                work.wait()
            return tensor.tolist()

        return wait

    def exchange_messages(self, ranks: Sequence[int], message: str) -> dict[int, str]:
        """Sends a message to all ranks, and returns those of `ranks`; waits as long as they are alive.

        For work that may take longer than a collective's timeout.

        Raises:
            PeerError: one of the ranks is gone.
        """
        if self.health is None:
            return {self.rank: message}
        try:
            return self.health.exchange(message, ranks)
        except StoreUnreachableError:  # the process that hosts it has exited or was killed: nothing to wait for
            return {self.rank: message}


@contextmanager
def init_distributed(
    config: DistributedConfig, run_dir: str = ".", needs_process_group: bool = False
) -> Iterator[DistributedContext]:
    """Initializes the process group that the launcher describes, and destroys it on exit.

    Args:
        config: section distributed
        run_dir: a folder that ranks share, for the rendezvous if the launcher's address can't be resolved
        needs_process_group: whether a single process needs a group, of itself alone

    Raises:
        UserError: the launcher's variables do not fit, or the other ranks did not come.
        PeerError: another rank is gone.
    """
    info, health = detect_launch_environment(os.environ), None
    set_rank(info.rank)
    backend = "cpu:gloo,cuda:nccl" if use_cuda(config.backend) else "gloo"
    timeout = timedelta(seconds=config.timeout_seconds)
    if info.world_size > 1:
        init_method = resolve_init_method(info, config.init_method, run_dir)
        health = _init_process_group(info, config, init_method, backend, timeout)
    elif needs_process_group:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    context = None
    try:
        context = DistributedContext(info, health, timeout)
        yield context
    except UserError:
        raise
    except Exception as error:
        explained = health.explain(error) if health else error
        if explained is error:
            raise
        raise explained from error
    finally:
        for callback in context.exit_callbacks if context else []:
            callback()
        if health is not None:
            health.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _init_process_group(
    info: RankInfo, config: DistributedConfig, init_method: str, backend: str, timeout: timedelta
) -> HealthMonitor:
    rank, world_size = info.rank, info.world_size
    try:
        store = rendezvous(init_method, rank, world_size, timeout)
        select_gloo_interface(dist.PrefixStore("network", store), rank, world_size, init_method)
        store_host = "torchrun's agent" if uses_agent_store(init_method) else "rank 0"
        health = HealthMonitor(store, rank, world_size, store_host)
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
        return health
    except (ValueError, RuntimeError, OSError) as error:
        address = f" {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if init_method == "env://" else ""
        advice = f"are all {world_size} processes started, and does this address lead to the first one?"
        if "EADDRINUSE" in str(error):
            advice = "another program has this port: take a free one, or let `torchrun --standalone` find one"
        raise UserError(
            f"rank {rank} of {world_size} on {platform.node()} found no process group at {init_method}{address} "
            f"(distributed.timeout_seconds is {config.timeout_seconds:g}): {error}; {advice}"
        ) from error
