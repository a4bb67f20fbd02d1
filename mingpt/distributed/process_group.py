"""How do ranks talk?

With one process there is no process group, and everything here becomes the obvious local thing.
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
from mingpt.distributed.launch_environment import RankInfo, detect_launch_environment, resolve_init_method
from mingpt.distributed.network import select_gloo_interface
from mingpt.utils.device import choose_device, use_cuda, visible_gpu_uuids
from mingpt.utils.errors import StoreUnreachableError, UserError

T = TypeVar("T")


class DistributedContext:
    """The ranks of this run and this process's place among them.

    Args:
        place: this process's, as its launcher tells
        peers: the others, where there are any
        timeout: how long one waits for another
    """

    def __init__(self, place: RankInfo, peers: HealthMonitor | None = None, timeout: timedelta | None = None) -> None:
        self.rank, self.world_size, self.peers, self.timeout = place.rank, place.size, peers, timeout
        self.group: dist.ProcessGroup | None = None  # all ranks
        self.exit_callbacks: list[Callable[[], None]] = []  # called while the group is still there
        host, hosts = platform.node(), self.all_gather_object(platform.node())
        self.local_rank = hosts[: self.rank].count(host) if place.local_rank is None else place.local_rank
        self.local_world_size = hosts.count(host) if place.local_size is None else place.local_size
        self.device = torch.device("cpu")

    def subgroup(self, parts: Iterable[Sequence[int]]) -> DistributedContext:
        """A world of the ranks that share one of these parts with this rank; all ranks name the same parts."""
        part = copy(self)
        for ranks in parts:
            group = dist.new_group(list(ranks), timeout=self.timeout)
            if self.rank in ranks:
                part.rank, part.world_size, part.group = ranks.index(self.rank), len(ranks), group
        return part

    def init_device(self, backend: str) -> None:
        """Makes this rank's device its own.

        Raises:
            UserError: there are too few, on every rank.
        """
        host, gpus = platform.node(), self.raise_on_all_ranks(lambda: visible_gpu_uuids(backend))
        others = self.all_gather_object((host, gpus))
        others.pop(self.rank)
        # srun may deal GPUs out: each process then sees its own alone, as number 0.
        alone = not any(there == host and set(theirs) & set(gpus) for there, theirs in others)
        local_rank, local_size = (0, 1) if gpus and alone else (self.local_rank, self.local_world_size)
        self.device = self.raise_on_all_ranks(lambda: choose_device(backend, local_rank, local_size, self.world_size))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def backend(self) -> str:
        """Name of what carries gradients."""
        if self.world_size == 1:
            return "none, one process"
        return "nccl" if self.device.type == "cuda" else "gloo"

    def all_gather_object(self, value: T) -> list[T]:
        """Each rank's value, in rank order, on every rank."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """The source's value, on every rank."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, group_src=source, group=self.group)
        return values[0]

    def raise_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank; where it fails on any, it fails on all.

        Raises:
            UserError: the first failing rank's, on every rank.
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
        """Runs `action` on rank 0 while the others wait, and hands its result to all; fails on all if it fails."""
        return self.broadcast_object(self.raise_on_all_ranks(action if self.rank == 0 else lambda: None))  # type: ignore[return-value]

    def local_rank0_first(self, action: Callable[[], T]) -> T:
        """Runs `action`, quick where its work is done already, on one rank of each file system before the others.

        Rank 0 goes first, then the first rank of each machine, which finds the work done if the disk is shared.
        """
        self.raise_on_all_ranks(lambda: action() if self.rank == 0 else None)
        self.raise_on_all_ranks(lambda: action() if self.local_rank == 0 else None)
        return self.raise_on_all_ranks(action)

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Makes sure that every rank was given the same.

        Raises:
            UserError: a fact differs, naming rank, fact and both values.
        """
        first, *others = self.all_gather_object(dict(facts))
        for rank, other in enumerate(others, start=1):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise UserError(
                        f"{name} differs between ranks: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}; "
                        "start all of them with the same code, text, yaml and options"
                    )

    def shard_range(self, first: int, count: int, rank: int | None = None) -> range:
        """This rank's part (or another's) of `count` things from number `first` on; parts differ by at most one."""
        rank = self.rank if rank is None else rank
        return range(first + count * rank // self.world_size, first + count * (rank + 1) // self.world_size)

    def max_shard_size(self, count: int) -> int:
        """How many of `count` samples the rank with most of them has."""
        return -(-count // self.world_size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, written into `tensor` on all."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Overwrites the tensor with the source's."""
        if self.world_size > 1:
            dist.broadcast(tensor, group_src=source, group=self.group)

    def all_reduce_max_async(self, *values: int) -> Callable[[], list[int]]:
        """Starts to find the largest of each value that a rank has, and returns a function that waits for them.

        Ranks call it at the same step, and so learn at the same step that one of them was told to stop. What travels is
        a few integers over gloo, beside the step's own work and never behind a GPU's.
        """
        ballot = torch.tensor(values, dtype=torch.int32)
        work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, async_op=True) if self.world_size > 1 else None

        def count() -> list[int]:
            if work is not None:
                work.wait()
            return ballot.tolist()

        return count

    def exchange_messages(self, ranks: Sequence[int], word: str) -> dict[int, str]:
        """Says a word, and waits until each of these ranks has said one, for as long as they live; returns them.

        For what may take longer than a collective's timeout.

        Raises:
            PeerError: one of them is gone.
        """
        if self.peers is None:
            return {self.rank: word}
        try:
            return self.peers.exchange(word, ranks)
        except (
            StoreUnreachableError
        ):  # whoever keeps the store has left already, or was killed; there is nobody to wait for
            return {self.rank: word}


@contextmanager
def init_distributed(config: DistributedConfig, run_dir: str = ".") -> Iterator[DistributedContext]:
    """Forms the process group that the launcher describes, and takes it down again whatever happens.

    Args:
        config: how
        run_dir: a folder that ranks share, to meet in where they know no address

    Raises:
        UserError: the environment does not fit, or the other ranks did not come.
        PeerError: another rank is gone.
    """
    place = detect_launch_environment(os.environ)
    rank, size, peers = place.rank, place.size, None
    backend = "cpu:gloo,cuda:nccl" if use_cuda(config.backend) else "gloo"
    timeout = timedelta(seconds=config.timeout_seconds)
    if size == 1 and config.strategy in ("zero2", "fsdp"):  # whose mechanism wants a group, be it of one
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif size > 1:
        where = resolve_init_method(place, config.init_method, run_dir)
        try:
            store = rendezvous(where, rank, size, timeout)
            select_gloo_interface(dist.PrefixStore("network", store), rank, size, where)
            peers = HealthMonitor(store, rank, size, "torchrun's agent" if uses_agent_store(where) else "rank 0")
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout
            )
        except (ValueError, RuntimeError, OSError) as error:
            address = f" {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if where == "env://" else ""
            advice = f"are all {size} processes started, and does this address lead to the first one?"
            if "EADDRINUSE" in str(error):
                advice = "another program has this port: take a free one, or let `torchrun --standalone` find one"
            raise UserError(
                f"rank {rank} of {size} on {platform.node()} found no process group at {where}{address} "
                f"(distributed.timeout_seconds is {config.timeout_seconds:g}): {error}; {advice}"
            ) from error
    context = None
    try:
        context = DistributedContext(place, peers, timeout)
        yield context
    except UserError:
        raise
    except Exception as error:
        if peers is None:
            raise
        explained = peers.explain(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        for let_go in context.exit_callbacks if context else []:
            let_go()
        if peers is not None:
            peers.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, or the whole of one that is not dealt out."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor, which takes long to import
