"""With distributed.survive: collectives within a view of the membership, which end when the view does.

While a Trainer is constructed, its process is alone: rank 0 of 1, without collectives. It becomes a member at the first
`regroup`.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.config import Config, DistributedConfig
from mingpt.distributed.collectives import DistributedContext, PendingFlags
from mingpt.distributed.heartbeat import HEARTBEAT_INTERVAL, heartbeat_key
from mingpt.distributed.launch_environment import RankInfo, local_address, machine_id, select_gloo_interface
from mingpt.distributed.position import COLLECTIVES, PositionReader
from mingpt.distributed.rendezvous import first_different, generation_store
from mingpt.errors import PeerError, UserError
from mingpt.hardware.device import visible_gpu_uuids
from mingpt.monitoring.logging import set_rank
from mingpt.parallel.build import strategy_class
from mingpt.survive.membership import POLL_SECONDS, Membership, MembershipChanged, View
from mingpt.survive.supervisor import FAILED, TOKEN, tell_supervisor

WAIT_SLICE = timedelta(seconds=0.1)  # between looks, in a collective, at whether the view is over


class SurvivingContext(DistributedContext):
    """This process's rank in the view, and collectives that raise MembershipChanged once the view is over.

    Attributes:
        launch_rank: by which the launcher knows this process; `rank` is another one in each view
        is_joining: others have the state of the run already, and this process gets it from them
    """

    def __init__(self, info: RankInfo, config: DistributedConfig, store: dist.Store, address: str | None) -> None:
        self.launch_rank = info.rank
        self.store = store
        super().__init__(RankInfo(0, 1, info.local_rank or 0, info.local_world_size), config)
        advice = "check the driver where it is cpu, or train on CPUs everywhere with --distributed.backend gloo"
        self.check_equal({"the type of device": self.device.type}, advice=advice)
        self.restart_count = info.restart_count
        self.view = 0  # its number; 0: this process is no member yet
        self.calls = 0  # collectives of this view, or before calls of local_rank0_first
        label = f"{info.rank}@{platform.node()}:{os.getpid()}"
        reader = PositionReader(lambda: {f"view {self.view}": self.calls}, (*COLLECTIVES, __file__))
        self.membership = Membership(store, info.world_size, label, address, config.timeout_seconds, reader.read)
        store.set(f"name/{info.rank}", self.membership.name)
        self.is_joining = self.membership.has_live_members()
        self.ends_view = False  # after this step, since a process waits to join
        set_rank(info.rank or int(self.is_joining))  # only a founder logs before it is a member

    # Views

    def regroup(self, step: int) -> View:
        """Waits for the next view with this process, as `Membership.regroup`."""
        view = self.membership.regroup(step)
        self.rank = view.members.index(self.membership.name)
        self.world_size = len(view.members)
        self.view = view.number
        self.calls = 0
        self.ends_view = False
        set_rank(self.rank)
        return view

    # While the Trainer is constructed

    def _choose_device(self, backend: str) -> torch.device:
        """A GPU that no other rank has chosen; the process that takes this one's place chooses the same."""
        gpus = visible_gpu_uuids(backend)
        rank = str(self.launch_rank)
        for i in range(len(gpus)):
            number = (self.local_rank + i) % len(gpus)
            if self.store.compare_set(f"gpu/{gpus[number]}", "", rank).decode() == rank:
                return torch.device("cuda", number)
        if gpus:
            raise UserError(
                f"rank {rank}: other ranks have taken the {len(gpus)} GPU(s) of {platform.node()}: start at most one "
                "process per GPU, or train on the CPU with --distributed.backend gloo"
            )
        return torch.device("cpu")

    @property
    def backend(self) -> str:
        backend = super().backend
        return "gloo, through host memory" if backend == "nccl" else backend

    def check_equal(
        self,
        values: Mapping[str, Any],
        *,
        advice: str = "start all of them with the same code, text, yaml and options",
    ) -> None:
        """Raises a UserError if another process has passed different values, before or after."""
        for name, value in values.items():
            first = self.store.compare_set(f"equal/{name}", "", repr(value)).decode()
            if first != repr(value):
                raise UserError(
                    f"{name} differs between ranks: {value!r} on rank {self.launch_rank}, {first} on another; {advice}"
                )

    @contextmanager
    def local_rank0_first(self) -> Iterator[None]:
        """The process that the launcher calls rank 0 runs the block first, and local rank 0 before others of a host."""
        self.calls += 1
        by_rank0 = f"prepared/{self.calls}"
        on_this_host = f"prepared/{self.calls}/{platform.node()}"
        if self.local_rank > 0:
            self._wait_for(on_this_host, self.launch_rank - self.local_rank)
        elif self.launch_rank > 0:
            self._wait_for(by_rank0, 0)
        yield
        if self.launch_rank == 0:
            self.store.set(by_rank0, "")
        if self.local_rank == 0:
            self.store.set(on_this_host, "")

    def _wait_for(self, key: str, rank: int) -> None:
        """Waits for a key that the process which the launcher calls `rank` sets, as long as that is alive.

        Raises:
            UserError: it has been silent for `distributed.timeout_seconds`.
        """
        last = b""
        delay = POLL_SECONDS
        deadline = self._deadline()
        while not self.store.check([key]):
            heartbeat = self.store.get(heartbeat_key(self.store.get(f"name/{rank}").decode()))
            if heartbeat != last:
                last = heartbeat
                deadline = self._deadline()
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {rank} has been silent for {self.timeout.total_seconds():g} seconds "
                    "(distributed.timeout_seconds), and has not prepared the text for the others: see its messages"
                )
            time.sleep(delay)
            delay = min(1.1 * delay, HEARTBEAT_INTERVAL)

    # Collectives

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """On all ranks."""
        gathered = tensor.new_empty(self.world_size * len(tensor))
        self.run(lambda group: group._allgather_base(gathered, tensor))
        return list(gathered.view(self.world_size, -1))

    def _scatter(self, received: Tensor, sent: list[Tensor]) -> Tensor:
        """All ranks have computed what they would receive."""
        return sent[self.rank % len(sent)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        host = host_memory(tensor).copy_(tensor)
        self.run(lambda group: group.allreduce([host]))
        return tensor.copy_(host, non_blocking=True)

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        host = host_memory(gathered)
        sent = host_memory(tensor).copy_(tensor)
        self.run(lambda group: group._allgather_base(host, sent))
        gathered.copy_(host, non_blocking=True)

    def all_to_all(self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]) -> None:
        host = host_memory(received)
        sent = host_memory(sent).copy_(sent)
        self.run(lambda group: group.alltoall_base(host, sent, received_rows, sent_rows))
        received.copy_(host, non_blocking=True)

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        host = host_memory(tensor).copy_(tensor)
        self.run(lambda group: group.broadcast(host, source))
        tensor.copy_(host, non_blocking=True)

    def all_reduce_flags(self, *values: int) -> PendingFlags:
        """As in a DistributedContext; the view ends with this step if all watchers know of one that waits to join."""
        self.membership.check()
        if self.ends_view:
            self._end_view("a process has asked to join")
        is_unknown = self.membership.is_watcher and not self.membership.has_joiners
        flags = torch.tensor([*values, int(is_unknown)], dtype=torch.int32)
        return SurvivingFlags(flags, self._start(lambda group: group.allreduce([flags], dist.ReduceOp.MAX)), self)

    def run(self, start: Callable[[Any], dist.Work]) -> None:
        """Starts a collective with the group that it is given, and waits for it."""
        self.wait(self._start(start))

    def _start(self, start: Callable[[Any], dist.Work]) -> dist.Work | None:
        """One process has no group."""
        if self.world_size == 1:
            return None
        self.membership.check()
        self.calls += 1
        try:
            return self.membership.group.start(start)
        except RuntimeError as error:
            self._end_view("a collective has failed", error)

    def wait(self, work: dist.Work | None) -> None:
        """Waits for a collective unless the view ends."""
        # Who ends a late view reads where all are. So of many members a few do so first.
        deadline = self._deadline() + self.membership.turn * HEARTBEAT_INTERVAL
        while work is not None:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():  # another process is dead, or has left the view
                    self._end_view("a collective has failed", error)
            self.membership.check()
            if time.monotonic() > deadline:
                self.membership.end_late_view()
                raise MembershipChanged

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout.total_seconds()

    def _end_view(self, reason: str, error: RuntimeError | None = None) -> NoReturn:
        self.membership.end_view(reason)
        raise MembershipChanged from error

    # The end of the run

    def is_member(self) -> bool:
        """Whether the other processes have not continued without this one, which may not know it."""
        with suppress(RuntimeError, OSError):
            return not self.membership.is_left_out()
        return True

    def metrics(self) -> dict[str, int]:
        return {**super().metrics(), "view": self.view}


class SurvivingFlags(PendingFlags):
    """Flags reduced in a view; the last one is 0 if all watchers know that a process waits to join."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, context: SurvivingContext) -> None:
        super().__init__(tensor, work)
        self.context = context

    def wait(self) -> list[int]:
        self.context.wait(self.work)
        *maxima, is_unknown = self.tensor.tolist()
        self.context.ends_view = not is_unknown
        return maxima


def host_memory(tensor: Tensor) -> Tensor:
    """Memory of the tensor's shape for gloo: the tensor itself, or, if it is on a GPU, a new one in pinned memory.

    NCCL's kernels would wait on the GPU for a process that is dead.
    """
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu", pin_memory=True)


@contextmanager
def open_context(config: Config, info: RankInfo, init_method: str, host: str, port: int) -> Iterator[SurvivingContext]:
    """Connects to the store at this host and port, and returns a context that is no member yet.

    Raises:
        UserError: the others did not connect.
    """
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    set_rank(info.rank)
    try:
        root = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        # The trainers of one supervisor have one token, so that those which come later find the others.
        store = generation_store(root, info.rank, info.world_size, timeout, os.environ[TOKEN])
        is_one_host = not first_different(dist.PrefixStore("host", store), info.rank, info.world_size, machine_id())
        select_gloo_interface(is_one_host, init_method)
        address = local_address(is_one_host, host)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"rank {info.rank} of {info.world_size} on {platform.node()} found no store at {host}:{port} "
            f"(distributed.timeout_seconds is {timeout.total_seconds():g}): {error}; are all {info.world_size} "
            "processes started, and does this address lead to the first one?"
        ) from error
    context = SurvivingContext(info, config.distributed, store, address)
    try:
        strategy_class(config).validate(config, info.world_size)
        yield context
    except UserError as error:
        name = context.membership.name
        with suppress(RuntimeError, OSError):  # the first process that has this message reports it
            error.is_reported = store.compare_set(f"reported/{str(error)!a}", "", name).decode() != name
        raise
    except PeerError:
        tell_supervisor(FAILED)
        raise
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        tell_supervisor(FAILED)
        raise PeerError(f"the store at {host}:{port} does not answer, or is cut off from rank {info.rank}") from error
    finally:
        context.membership.liveness.stop()
