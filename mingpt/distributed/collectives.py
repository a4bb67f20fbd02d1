"""The rank of this process, and collectives, which a single process without a process group computes locally."""

import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.config.schema import DistributedConfig
from mingpt.distributed.health import HealthMonitor
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.position import find_line, format_list, format_ranks
from mingpt.errors import PeerError, UserError
from mingpt.system.device import choose_device, visible_gpu_uuids

CUDA_EXTRA_TIMEOUT = timedelta(seconds=60)  # of NCCL's collectives, in addition to distributed.timeout_seconds
NO_TIMEOUT = timedelta(days=365)

T = TypeVar("T")
R = TypeVar("R")


class DistributedContext:
    """This process's rank and device, and collectives with the other ranks.

    Args:
        info: as the launcher tells it
        health: None for a single process

    Raises:
        UserError: on all ranks, if a host has fewer GPUs than processes, or no GPU for nccl.
    """

    exit_callbacks: ClassVar[list[Callable[[], None]]] = []  # called before the process's group is destroyed

    def __init__(self, info: RankInfo, config: DistributedConfig, health: HealthMonitor | None = None) -> None:
        self.rank = info.rank
        self.world_size = info.world_size
        self.restart_count = info.restart_count
        self.health = health
        self.timeout = timedelta(seconds=config.timeout_seconds)
        self.group: dist.ProcessGroup | None = None  # None: all ranks
        local_rank, local_world_size = self._exchange(platform.node(), _local_ranks)
        self.local_rank = local_rank if info.local_rank is None else info.local_rank
        self.local_world_size = info.local_world_size or local_world_size
        with self.shared_errors():
            gpus = visible_gpu_uuids(config.backend)
        is_shared = self.reduce_object(gpus, lambda found: max(Counter(chain(*found)).values(), default=0) > 1)
        with self.shared_errors():
            if gpus and not is_shared:  # as srun assigns them: each process sees only its own, as number 0
                self.device = choose_device(config.backend, 0, 1, self.world_size)
            else:
                self.device = choose_device(config.backend, self.local_rank, self.local_world_size, self.world_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def subgroup(self, groups: Iterable[Sequence[int]], description: str | None = None) -> "DistributedContext":
        """Returns the context of this rank's group of ranks; all ranks must list the same groups."""
        context = copy(self)
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=self.timeout, group_desc=description)
            if self.rank in ranks:
                extend_cuda_timeout(group)
                context.rank = ranks.index(self.rank)
                context.world_size = len(ranks)
                context.group = group
        return context

    def unchecked_group(self) -> dist.ProcessGroup | None:
        """Returns the group of this context's ranks for DDP, which all of them call.

        It is another one with TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps gloo in a backend that compares collectives.
        DDP's logger would take the wrapper for gloo, and crash (torch 2.13: Logger::set_env_variables in logger.cpp).
        """
        if dist.get_debug_level() != dist.DebugLevel.DETAIL or self.backend != "gloo":
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        dist.set_debug_level(dist.DebugLevel.INFO)
        group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True)
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        return group

    @property
    def backend(self) -> str:
        """The backend that reduces gradients."""
        if self.world_size == 1:
            return "none, one process"
        return "nccl" if self.device.type == "cuda" else "gloo"

    def reduce_object(self, value: T, combine: Callable[[list[T]], R]) -> R:
        """Returns the result of `combine` for the values of all ranks, in rank order, which rank 0 computes.

        Values and result must be JSON's; with several ranks, tuples become lists.
        """
        return self._exchange(value, lambda values: [combine(values)])

    def all_gather_object(self, value: T) -> list[T]:
        """Returns each rank's value, as `reduce_object` does. Rank 0 sends all of them to all ranks."""
        return self.reduce_object(value, list)

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Returns the source rank's value, as `reduce_object` does."""
        sent = value if self.rank == source else None
        return self.reduce_object(sent, lambda values: values[source])  # type: ignore[return-value]

    def _exchange(self, value: T, answer: Callable[[list[T]], list[R]]) -> R:
        """Returns rank 0's answer to this rank: `answer` returns one for each rank, or a single one for all.

        Raises:
            PeerError: ranks call this in different places.
        """
        if self.world_size == 1:
            return answer([value])[0]
        place = find_line(sys._getframe())
        # JSON and not pickle, which would run the code of any process that reaches a rank's port.
        message = json.dumps([place, value])
        sizes = self._gather(torch.tensor([len(message)]))
        rows = self._gather(_encode(message, self._share_max(map(int, sizes))))
        answers = []
        if rows:
            messages = [_decode(row) for row in rows]
            difference = _compare_places([tuple(place) for place, _ in messages])
            results = [None] if difference else answer([value for _, value in messages])
            answers = [json.dumps([difference, result]) for result in results]
        size = self._share_max(map(len, answers))
        received = torch.empty(size, dtype=torch.uint8)
        difference, result = _decode(self._scatter(received, [_encode(each, size) for each in answers]))
        if difference:
            raise PeerError(difference)
        return result

    def _share_max(self, numbers: Iterable[int]) -> int:
        """Returns the largest of rank 0's numbers."""
        largest = torch.tensor([max(numbers, default=0)])
        return int(self._scatter(torch.empty_like(largest), [largest]))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks on rank 0, and an empty list on others.

        Like `_scatter`, it uses a collective that nothing else uses. If ranks were in different collectives of the same
        kind, gloo would match them up, or would end a process where their sizes differ.
        """
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(tensor, rows, group_dst=0, group=self.group)
        return rows or []

    def _scatter(self, received: Tensor, sent: list[Tensor]) -> Tensor:
        """Overwrites `received` with the tensor that rank 0 sends to this rank: it sends one to each, or one to all."""
        copies = sent * (self.world_size // len(sent)) if self.rank == 0 else None
        dist.scatter(received, copies, group_src=0, group=self.group)
        return received

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raises a UserError of any rank's block on all ranks: that of the first rank that has one."""
        message = None
        try:
            yield
        except UserError as error:
            message = str(error)
        first = self.reduce_object(message, _first_error)
        if first is not None:
            raise UserError(first)

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Ranks wait for each other, in collectives on the CPU, as long as all are alive: one may work for an hour."""
        # DETAIL's wrapper of the backend also waits in a group of its own, whose timeout stays the same (torch 2.13).
        # PyTorch 2.10 refuses to set the wrapper's timeout.
        if self.world_size == 1 or dist.get_debug_level() == dist.DebugLevel.DETAIL:
            yield
            return
        backend = (self.group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        backend.set_timeout(NO_TIMEOUT)
        try:
            yield
        finally:
            backend.set_timeout(self.timeout)

    @contextmanager
    def local_rank0_first(self) -> Iterator[None]:
        """Rank 0 runs the block first, then local rank 0 of each other host, then all others, which find its files.

        A UserError of any rank is raised on all ranks, before later ones run the block.
        """
        my_turn = 2
        if self.local_rank == 0:
            my_turn = 1
        if self.rank == 0:
            my_turn = 0
        with self.without_timeout():
            for turn in range(3):
                with self.shared_errors():
                    if turn == my_turn:
                        yield

    def check_equal(
        self,
        values: Mapping[str, Any],
        *,
        advice: str = "start all of them with the same code, text, yaml and options",
    ) -> None:
        """Raises a UserError with rank, name, both values and `advice` if ranks pass different values."""
        difference = self.reduce_object(dict(values), _first_difference)
        if difference is not None:
            raise UserError(f"{difference}; {advice}")

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

    def all_reduce_flags(self, *values: int) -> "PendingFlags":
        """Starts an all-reduce of each value to its maximum over all ranks.

        Ranks call it at the same step, so all of them know at the same step that one has received a signal.
        """
        flags = torch.tensor(values, dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True) if self.world_size > 1 else None
        return PendingFlags(flags, work)

    def end_collectives(self) -> None:
        """Declares that training has ended here: from now on the loss of another rank does not end this process."""
        if self.health is not None:
            self.health.is_watching = False


class PendingFlags:
    """The maximum of each value over all ranks, which is reduced while the caller continues.

    The tensor is on the CPU and reduced by gloo, so it does not wait for work on a GPU.
    """

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self.tensor = tensor
        self.work = work

    def wait(self) -> list[int]:
        if self.work is not None:
            self.work.wait()
        return self.tensor.tolist()


def _encode(text: str, size: int) -> Tensor:
    """ASCII in a tensor, (size,), padded by spaces, which JSON ignores."""
    return torch.frombuffer(bytearray(text.ljust(size).encode()), dtype=torch.uint8)


def _decode(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _local_ranks(hosts: list[str]) -> list[tuple[int, int]]:
    """Each rank's number among the ranks of its host, and their number."""
    return [(hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)]


def _first_error(messages: list[str | None]) -> str | None:
    for rank, message in enumerate(messages):
        if message is not None:
            return f"rank {rank}: {message}" if rank else message
    return None


def _first_difference(values: list[dict[str, Any]]) -> str | None:
    first, *others = values
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                return f"{name} differs between ranks: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
    return None


def _compare_places(places: list[tuple[str, str]]) -> str:
    """Says that ranks exchange objects in different places, each a function and a line; empty if they do not."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    if len(ranks) == 1:
        return ""
    each = [f"{format_ranks(found)}: in {function} at {line}" for (function, line), found in ranks.items()]
    return f"all {len(places)} ranks are alive, but ranks have reached different collectives; {format_list(each, '; ')}"


def extend_cuda_timeout(group: dist.ProcessGroup) -> None:
    """Gives NCCL more time than gloo, so that a collective on the CPU, such as the flags of each step, fails first.

    Its error is an exception, after which ranks find out which of them is dead. NCCL's watchdog ends the process
    (handleException in ProcessGroupNCCL.cpp). `setTimeout` there applies to collectives from then on.
    """
    cpu_backend = group._get_backend(torch.device("cpu"))
    cuda_backend = group._get_backend(torch.device("cuda"))
    # PyTorch 2.10 refuses to set the timeout of DETAIL's wrapper.
    if cuda_backend is not cpu_backend and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        cuda_backend.set_timeout(cuda_backend.options._timeout + CUDA_EXTRA_TIMEOUT)
