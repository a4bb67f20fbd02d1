"""The process group and its collectives, which a single process without a group computes locally."""

import errno
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.config import DistributedConfig
from mingpt.distributed.health import FILE_SYSTEM, HealthMonitor
from mingpt.distributed.launch_environment import (
    RankInfo,
    detect_launch_environment,
    host_and_port,
    resolve_init_method,
    select_gloo_interface,
    uses_agent_store,
)
from mingpt.distributed.plain_data import decode, encode
from mingpt.distributed.position import find_line, format_ranks
from mingpt.distributed.rendezvous import rendezvous
from mingpt.errors import PeerError, StoreUnreachableError, UserError
from mingpt.hardware.device import choose_device, use_cuda, visible_gpu_uuids
from mingpt.monitoring.logging import set_rank

CUDA_EXTRA_TIMEOUT = timedelta(seconds=60)  # of NCCL's collectives, in addition to distributed.timeout_seconds

MAX_OBJECT_BYTES = 1 << 30

T = TypeVar("T")


class DistributedContext:
    """This process's rank and device, and collectives with the other ranks."""

    def __init__(self, info: RankInfo, health: HealthMonitor | None = None, timeout: timedelta | None = None) -> None:
        self.rank = info.rank
        self.world_size = info.world_size
        self.restart_count = info.restart_count
        self.health = health
        self.timeout = timeout
        self.group: dist.ProcessGroup | None = None  # None: all ranks
        self.exit_callbacks: list[Callable[[], None]] = []  # called before the process group is destroyed
        host = platform.node()
        hosts = self.all_gather_object(host)
        self.local_rank = hosts[: self.rank].count(host) if info.local_rank is None else info.local_rank
        self.local_world_size = info.local_world_size or hosts.count(host)
        self.device = torch.device("cpu")

    def subgroup(self, groups: Iterable[Sequence[int]], description: str | None = None) -> "DistributedContext":
        """Returns the context of this rank's group of ranks; all ranks must list the same groups."""
        context = copy(self)
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=self.timeout, group_desc=description)
            if self.rank in ranks:
                _extend_cuda_timeout(group)
                context.rank = ranks.index(self.rank)
                context.world_size = len(ranks)
                context.group = group
        return context

    def init_device(self, backend: str) -> None:
        """Sets `device`; on all ranks, it is a UserError if some host has fewer GPUs than processes."""
        host = platform.node()
        with self.shared_errors():
            gpus = visible_gpu_uuids(backend)
        found = self.all_gather_object((host, gpus))
        others = found[: self.rank] + found[self.rank + 1 :]
        is_shared = any(other_host == host and set(other_gpus) & set(gpus) for other_host, other_gpus in others)
        with self.shared_errors():
            if gpus and not is_shared:  # as srun assigns them: each process sees only its own, as number 0
                self.device = choose_device(backend, 0, 1, self.world_size)
            else:
                self.device = choose_device(backend, self.local_rank, self.local_world_size, self.world_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def backend(self) -> str:
        """The backend that reduces gradients."""
        if self.world_size == 1:
            return "none, one process"
        return "nccl" if self.device.type == "cuda" else "gloo"

    def all_gather_object(self, value: T) -> list[T]:
        """Returns each rank's value, in rank order. It is plain data; with several ranks, tuples become lists."""
        if self.world_size == 1:
            return [value]
        place = find_line(sys._getframe())
        data = torch.frombuffer(bytearray(encode([place, value])), dtype=torch.uint8)
        sizes = self._gather_on_all(torch.tensor([len(data)])).flatten().tolist()
        if not all(0 < size <= MAX_OBJECT_BYTES for size in sizes):
            raise RuntimeError(f"gloo has received {sizes} as the sizes of objects")
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self._gather_on_all(padded)
        answers = [decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
        _check_places([tuple(place) for place, _ in answers])
        return [value for _, value in answers]

    def _gather_on_all(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, (n,) each, as (world_size, n).

        It does so by collectives that nothing else uses: where ranks are in different ones of the same kind, gloo takes
        one for the other, or ends a process if their sizes differ.
        """
        rows: list[Tensor] | None = None
        if self.rank == 0:
            rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.gather(tensor, rows, group_dst=0, group=self.group)
        gathered = tensor.new_empty(self.world_size, len(tensor))
        copies = [torch.stack(rows)] * self.world_size if rows else None
        dist.scatter(gathered, copies, group_src=0, group=self.group)
        return gathered

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Returns the source rank's value. It is plain data; with several ranks, tuples become lists."""
        return self.all_gather_object(value if self.rank == source else None)[source]  # type: ignore[return-value]

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raises a UserError of any rank's block on all ranks: that of the first rank that has one."""
        message = None
        try:
            yield
        except UserError as error:
            message = str(error)
        self._raise_shared(message)

    def _raise_shared(self, message: str | None) -> None:
        for rank, other in enumerate(self.all_gather_object(message)):
            if other is not None:
                raise UserError(f"rank {rank}: {other}" if rank else other)

    @contextmanager
    def local_rank0_first(self) -> Iterator[None]:
        """Rank 0 runs the block first, then local rank 0 of each other host, then all others, which find its files.

        A UserError of any rank is raised on all ranks, before later ones run the block.
        """
        turn = 2
        if self.local_rank == 0:
            turn = 1
        if self.rank == 0:
            turn = 0
        for _ in range(turn):
            self._raise_shared(None)
        with self.shared_errors():
            yield
        for _ in range(turn + 1, 3):
            self._raise_shared(None)

    def check_equal(
        self,
        values: Mapping[str, Any],
        *,
        advice: str = "start all of them with the same code, text, yaml and options",
    ) -> None:
        """Raises a UserError with rank, name, both values and `advice` if ranks pass different values."""
        first, *others = self.all_gather_object(dict(values))
        for rank, other in enumerate(others, start=1):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise UserError(
                        f"{name} differs between ranks: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}; "
                        f"{advice}"
                    )

    def agree_on(self, name: str, value: T) -> T:
        """Returns rank 0's value. It is plain data, and `name` is its own."""
        return self.broadcast_object(value)

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

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        """Overwrites `gathered`, (n * world_size,), with the tensors of all ranks, (n,) each."""
        dist.all_gather_single(gathered, tensor, group=self.group)

    def all_to_all(self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]) -> None:
        """Sends consecutive rows to each rank and overwrites `received` with those of each, as many as listed."""
        dist.all_to_all_single(received, sent, received_rows, sent_rows, group=self.group)

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Overwrites the tensor with the source rank's."""
        if self.world_size > 1:
            dist.broadcast(tensor, group_src=source, group=self.group)

    def all_reduce_flags(self, *values: int) -> "PendingFlags":
        """Starts to reduce each value to its maximum over all ranks.

        Ranks call it at the same step, so all of them see at the same step that one received a signal.
        """
        return PendingFlags(values, self.world_size)

    def is_member(self) -> bool:
        """Whether this process is still one of the ranks of the run. A lost rank ends a run of this kind."""
        return True

    def metrics(self) -> dict[str, int]:
        """What each train row says of the ranks."""
        return {"world_size": self.world_size, "restart_count": self.restart_count}

    def end_collectives(self) -> None:
        """Declares that training has ended here: from now on the loss of another rank does not end this process."""
        if self.health is not None:
            self.health.is_watching = False

    def exchange_messages(self, ranks: Sequence[int], message: str) -> dict[int, str]:
        """Sends a message to all ranks and returns those of `ranks`, for which it waits as long as they are alive."""
        if self.health is not None:
            with suppress(StoreUnreachableError):  # the process that hosts it is gone: there is nothing to wait for
                return self.health.exchange(message, ranks)
        return {self.rank: message}


class PendingFlags:
    """The maximum of each value over all ranks, reduced while the caller goes on.

    The tensor is on the CPU and reduced by gloo, so it does not wait for work on a GPU.
    """

    def __init__(self, values: Sequence[int], world_size: int) -> None:
        self.tensor = torch.tensor(values, dtype=torch.int32)
        self.work: dist.Work | None = None
        if world_size > 1:
            self.work = dist.all_reduce(self.tensor, op=dist.ReduceOp.MAX, async_op=True)

    def wait(self) -> list[int]:
        if self.work is not None:
            self.work.wait()
        return self.tensor.tolist()


def _check_places(places: list[tuple[str, str]]) -> None:
    """Raises a PeerError if ranks exchange objects in different places, each a function and a line."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    if len(ranks) > 1:
        each = [f"{format_ranks(found)}: in {function} at {line}" for (function, line), found in ranks.items()]
        raise PeerError(
            f"all {len(places)} ranks are alive, but ranks have come to different collectives; {'; '.join(each)}"
        )


_contexts: list[DistributedContext] = []  # the one whose process group exists in this process


@contextmanager
def init_distributed(
    config: DistributedConfig, run_dir: str = ".", needs_process_group: bool = False
) -> Iterator[DistributedContext]:
    """Initializes the process group that the launcher describes, and destroys it on exit.

    After an error the group stays, since the process is about to report it and to end. NCCL would first wait for ranks
    that are gone or wait themselves (pytorch#196968). If the process continues, the next call destroys the group.

    Args:
        run_dir: shared by all ranks, which rendezvous there if the launcher's address does not resolve
        needs_process_group: whether a single process needs a group too

    Raises:
        UserError: the launcher's variables are wrong, the other ranks did not connect, or they have other backends.
        PeerError: another rank is gone.
    """
    _destroy_process_group()
    info = detect_launch_environment(os.environ)
    health = None
    set_rank(info.rank)
    backend = "cpu:gloo,cuda:nccl" if use_cuda(config.backend) else "gloo"
    timeout = timedelta(seconds=config.timeout_seconds)
    if info.world_size > 1:
        health = _init_process_group(info, config, run_dir, backend)
    elif needs_process_group:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        context = DistributedContext(info, health, timeout)
        _contexts.append(context)
        yield context
    except UserError as error:
        error.is_reported = error.is_reported or info.rank > 0  # all ranks raise the same
        raise
    except Exception as error:
        explained = health.explain(error) if health and not isinstance(error, (UserError, PeerError)) else error
        if explained is error:
            raise
        raise explained from error
    finally:
        if health:
            health.stop()
    _destroy_process_group()


def _destroy_process_group() -> None:
    for callback in [callback for context in _contexts for callback in context.exit_callbacks]:
        callback()
    _contexts.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _init_process_group(info: RankInfo, config: DistributedConfig, run_dir: str, backend: str) -> HealthMonitor:
    rank = info.rank
    world_size = info.world_size
    timeout = timedelta(seconds=config.timeout_seconds)
    init_method = resolve_init_method(info, config.init_method, run_dir)
    try:
        store = rendezvous(init_method, rank, world_size, timeout)
        _check_backends(dist.PrefixStore("backend", store), rank, world_size, backend)
        select_gloo_interface(dist.PrefixStore("network", store), rank, world_size, init_method)
        store_host = "rank 0"
        if init_method.startswith("file://"):
            store_host = FILE_SYSTEM
        elif uses_agent_store(init_method):
            store_host = "torchrun's agent"
        health = HealthMonitor(store, rank, world_size, store_host, config.timeout_seconds)
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
        _extend_cuda_timeout(dist.group.WORLD)  # type: ignore[arg-type]
        health.start()
        return health
    except (ValueError, RuntimeError, OSError) as error:
        address = ""
        if init_method == "env://":
            host, port = host_and_port(init_method)
            address = f" {host}:{port}"
        advice = f"are all {world_size} processes started, and does this address lead to the first one?"
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            advice = "another program has this port: take a free one, or let `torchrun --standalone` find one"
        raise UserError(
            f"rank {rank} of {world_size} on {platform.node()} found no process group at {init_method}{address} "
            f"(distributed.timeout_seconds is {config.timeout_seconds:g}): {error}; {advice}"
        ) from error


def _extend_cuda_timeout(group: dist.ProcessGroup) -> None:
    """Gives NCCL more time than gloo, so that a collective on the CPU, such as the flags of each step, fails first.

    Its error is an exception, after which ranks find out which of them is gone. NCCL's watchdog ends the process
    (handleException in ProcessGroupNCCL.cpp). `setTimeout` there applies to collectives from then on.
    """
    cpu_backend = group._get_backend(torch.device("cpu"))
    cuda_backend = group._get_backend(torch.device("cuda"))
    if cuda_backend is not cpu_backend:
        cuda_backend._set_default_timeout(cuda_backend.options._timeout + CUDA_EXTRA_TIMEOUT)


def _check_backends(store: dist.Store, rank: int, world_size: int, backend: str) -> None:
    """Compares what ranks have chosen: one whose GPU's driver is broken chooses gloo, and would wait for the others.

    Raises:
        UserError: they differ; rank 0 reports it.
    """
    store.set(f"choice/{rank}", f"{backend} on rank {rank} ({platform.node()})")
    choices = [choice.decode() for choice in store.multi_get([f"choice/{other}" for other in range(world_size)])]
    different = [choice for choice in choices if choice.split()[0] != choices[0].split()[0]]
    if different:
        store.set(f"received/{rank}", "")
        # Together, since rank 0 may host the store, and torchrun ends rank 0 once another has failed.
        with suppress(RuntimeError, OSError):
            store.multi_get([f"received/{other}" for other in range(world_size)])
        raise UserError(
            f"the backend differs between ranks: {choices[0]}, {different[0]}; PyTorch sees no GPU where it is gloo: "
            "check the driver there with nvidia-smi, or train on the CPU everywhere with --distributed.backend gloo",
            is_reported=rank > 0,
        )
