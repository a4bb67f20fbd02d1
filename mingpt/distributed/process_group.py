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
from mingpt.distributed.health import FILE_SYSTEM, HealthMonitor, rendezvous, uses_agent_store
from mingpt.distributed.launch_environment import (
    RankInfo,
    detect_launch_environment,
    host_and_port,
    resolve_init_method,
    select_gloo_interface,
)
from mingpt.distributed.plain_data import decode, encode
from mingpt.distributed.position import find_line, format_ranks
from mingpt.utils.device import choose_device, use_cuda, visible_gpu_uuids
from mingpt.utils.errors import PeerError, SharedUserError, StoreUnreachableError, UserError
from mingpt.utils.logging import set_rank

CUDA_EXTRA_TIMEOUT = timedelta(seconds=60)  # of NCCL's collectives, in addition to distributed.timeout_seconds

MAX_OBJECT_BYTES = 1 << 30

T = TypeVar("T")


class DistributedContext:
    """This process's rank and device, and collectives with the other ranks."""

    def __init__(self, info: RankInfo, health: HealthMonitor | None = None, timeout: timedelta | None = None) -> None:
        self.rank, self.world_size, self.health, self.timeout = info.rank, info.world_size, health, timeout
        # With distributed.survive, `rank` and `world_size` are others in each view.
        self.launch_rank, self.launch_world_size = info.rank, info.world_size
        self.restart_count = info.restart_count
        self.view: int | None = None  # number of the view of the membership, with distributed.survive
        self.is_joining = False  # with distributed.survive: others have the state of the run, and this process has not
        self.group: dist.ProcessGroup | None = None  # None: all ranks
        self.exit_callbacks: list[Callable[[], None]] = []  # called before the process group is destroyed
        host, hosts = platform.node(), self.all_gather_object(platform.node())
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
                context.rank, context.world_size, context.group = ranks.index(self.rank), len(ranks), group
        return context

    def init_device(self, backend: str) -> None:
        """Sets `device`; on all ranks, it is a UserError if some host has fewer GPUs than processes."""
        host, gpus = platform.node(), self.raise_on_all_ranks(lambda: visible_gpu_uuids(backend))
        others = [other for rank, other in enumerate(self.all_gather_object((host, gpus))) if rank != self.rank]
        # srun may assign GPUs: each process then sees only its own, as number 0.
        exclusive = not any(other_host == host and set(uuids) & set(gpus) for other_host, uuids in others)
        local_rank, local_size = (0, 1) if gpus and exclusive else (self.local_rank, self.local_world_size)
        self.device = self.raise_on_all_ranks(lambda: choose_device(backend, local_rank, local_size, self.world_size))
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

    def raise_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Runs `action` and returns its result; the UserError of the first rank that has one is raised on all ranks."""
        result, error = None, None
        try:
            result = action()
        except UserError as raised:
            error = str(raised)
        for rank, message in enumerate(self.all_gather_object(error)):
            if message is not None:
                raise UserError(f"rank {rank}: {message}" if rank else message)
        return result  # type: ignore[return-value]

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and returns its result on all ranks; a UserError is raised on all ranks."""
        return self.broadcast_object(self.raise_on_all_ranks(action if self.rank == 0 else lambda: None))  # type: ignore[return-value]

    def local_rank0_first(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0, then on local rank 0 of each host, then on all ranks, which find its files."""
        self.raise_on_all_ranks(lambda: action() if self.rank == 0 else None)
        self.raise_on_all_ranks(lambda: action() if self.local_rank == 0 else None)
        return self.raise_on_all_ranks(action)

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

    def first_value(self, name: str, value: T) -> T:
        """Returns the value that the first process has passed; they differ only with distributed.survive."""
        return value

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

    def all_reduce_max_async(self, *values: int) -> Callable[[], list[int]]:
        """Starts to reduce each value to its maximum over all ranks; returns a function that waits for the result.

        Ranks call it at the same step, so all of them see at the same step that one received a signal. The tensor is
        on the CPU and reduced by gloo, so it does not wait for work on a GPU.
        """
        tensor = torch.tensor(values, dtype=torch.int32)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True) if self.world_size > 1 else None

        def all_reduce_max() -> list[int]:
            if work is not None:
                work.wait()
            return tensor.tolist()

        return all_reduce_max

    def is_left_out(self) -> bool:
        """Whether, with distributed.survive, the other ranks have gone on without this one, which may not know it."""
        return False

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
    info, health = detect_launch_environment(os.environ), None
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
    rank, world_size, timeout = info.rank, info.world_size, timedelta(seconds=config.timeout_seconds)
    init_method = resolve_init_method(info, config.init_method, run_dir)
    try:
        store = rendezvous(init_method, rank, world_size, timeout)
        _check_backends(dist.PrefixStore("backend", store), rank, world_size, backend)
        select_gloo_interface(dist.PrefixStore("network", store), rank, world_size, init_method)
        store_host = FILE_SYSTEM if init_method.startswith("file://") else "rank 0"
        store_host = "torchrun's agent" if uses_agent_store(init_method) else store_host
        health = HealthMonitor(store, rank, world_size, store_host, config.timeout_seconds)
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
        _extend_cuda_timeout(dist.group.WORLD)  # type: ignore[arg-type]
        health.start()
        return health
    except (ValueError, RuntimeError, OSError) as error:
        address = " {}:{}".format(*host_and_port(init_method)) if init_method == "env://" else ""
        advice = f"are all {world_size} processes started, and does this address lead to the first one?"
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            advice = "another program has this port: take a free one, or let `torchrun --standalone` find one"
        raise UserError(
            f"rank {rank} of {world_size} on {platform.node()} found no process group at {init_method}{address} "
            f"(distributed.timeout_seconds is {config.timeout_seconds:g}): {error}; {advice}"
        ) from error


def _extend_cuda_timeout(group: dist.ProcessGroup) -> None:
    """Gives NCCL more time than gloo, so that a collective on the CPU, such as the vote of each step, fails first.

    Its error is an exception, after which ranks find out which of them is gone. NCCL's watchdog ends the process
    (handleException in ProcessGroupNCCL.cpp). `setTimeout` there applies to collectives from then on.
    """
    cpu_backend, cuda_backend = (group._get_backend(torch.device(kind)) for kind in ("cpu", "cuda"))
    if cuda_backend is not cpu_backend:
        cuda_backend._set_default_timeout(cuda_backend.options._timeout + CUDA_EXTRA_TIMEOUT)


def _check_backends(store: dist.Store, rank: int, world_size: int, backend: str) -> None:
    """Compares what ranks have chosen: one whose GPU's driver is broken chooses gloo, and would wait for the others.

    Raises:
        SharedUserError: they differ.
    """
    store.set(f"choice/{rank}", f"{backend} on rank {rank} ({platform.node()})")
    choices = [choice.decode() for choice in store.multi_get([f"choice/{other}" for other in range(world_size)])]
    different = [choice for choice in choices if choice.split()[0] != choices[0].split()[0]]
    if different:
        store.set(f"received/{rank}", "")
        # Together, since rank 0 may host the store, and torchrun ends rank 0 once another has failed.
        with suppress(RuntimeError, OSError):
            store.multi_get([f"received/{other}" for other in range(world_size)])
        raise SharedUserError(
            f"the backend differs between ranks: {choices[0]}, {different[0]}; PyTorch sees no GPU where it is gloo: "
            "check the driver there with nvidia-smi, or train on the CPU everywhere with --distributed.backend gloo"
        )
