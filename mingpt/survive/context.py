"""With distributed.survive: collectives within a view of the membership, which end when the view does.

While a Trainer is constructed, its process is alone: rank 0 of 1, without collectives. It becomes a member at the first
`regroup`.
"""

import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.config import Config, DistributedConfig
from mingpt.distributed.collectives import DistributedContext, PendingFlags
from mingpt.distributed.launch_environment import RankInfo, local_address, select_gloo_interface
from mingpt.distributed.position import COLLECTIVES, PositionReader
from mingpt.distributed.rendezvous import generation_store
from mingpt.errors import PeerError, RunEnded, UserError, is_oom_error
from mingpt.hardware.device import choose_device
from mingpt.monitoring.logging import set_rank
from mingpt.parallel.build import validate
from mingpt.survive.membership import (
    POLL_SECONDS,
    Membership,
    MembershipChanged,
    StateLostError,
    View,
    end_run,
    raise_if_ended,
    read_end,
)
from mingpt.survive.supervisor import FAILED, JOINED, RESTART_STATUS, TOKEN, TRAINED, tell_supervisor

WAIT_SLICE = timedelta(seconds=0.1)  # between looks, in a collective, at whether the view is over
MAX_VIEWS = 20  # in a row without a finished step

T = TypeVar("T")


class SurvivingContext(DistributedContext):
    """This process's rank in the view, and collectives that raise MembershipChanged once the view is over.

    Attributes:
        launch_rank: by which the launcher knows this process; `rank` is another one in each view
        is_joining: others have the state of the run already, and this process gets it from them

    Raises:
        RunEnded: the run has ended while this process started.
    """

    def __init__(self, info: RankInfo, config: DistributedConfig, store: dist.Store, address: str | None) -> None:
        super().__init__(RankInfo(0, 1, info.local_rank or 0, info.local_world_size), config)
        self.launch_rank = info.rank
        self.restart_count = info.restart_count
        self.store = store
        self.view = 0  # its number; 0: this process is no member yet
        self.calls = 0  # collectives of this view, or before calls of local_rank0_first
        raise_if_ended(store)
        label = f"{info.rank}@{platform.node()}:{os.getpid()}"
        reader = PositionReader(lambda: {f"view {self.view}": self.calls}, (*COLLECTIVES, __file__))
        self.membership = Membership(store, info.world_size, label, address, config.timeout_seconds, reader.read)
        self.is_joining = self.membership.has_live_members()
        self.views_without_step = 0
        self.last_step = -1
        self.exit_status = 0  # of this run if its last snapshot is saved, set before `exchange_messages`
        self.ends_view = False  # after this step, since somebody waits to join
        self.flag_reductions = 0  # calls of all_reduce_flags in this view: one at its beginning, one in each step
        set_rank(info.rank or int(self.is_joining))  # only a founder logs before it is a member

    # Views

    def regroup(self, step: int) -> View:
        """Waits for the next view with this process.

        Args:
            step: the step of this process's state; -1: it has none

        Raises:
            RunEnded: the run has ended meanwhile.
            RuntimeError: no step was finished in many views.
        """
        self.views_without_step = self.views_without_step + 1 if step == self.last_step else 0
        self.last_step = step
        if self.views_without_step > MAX_VIEWS:
            tell_supervisor(FAILED)
            raise RuntimeError(f"no step was finished in {MAX_VIEWS} views; {self.membership.view.reason}")
        try:
            view = self.membership.regroup(step)
        except StateLostError:
            os._exit(RESTART_STATUS)
        self.rank = self.membership.rank
        self.world_size = len(view.members)
        self.view = view.number
        self.calls = 0
        self.ends_view = False
        self.flag_reductions = 0
        set_rank(self.rank)
        tell_supervisor(JOINED)
        return view

    # While the Trainer is constructed

    def _choose_device(self, backend: str) -> torch.device:
        device = choose_device(backend, self.local_rank, self.local_world_size, max(2, self.local_world_size))
        if device.type != "cpu":
            raise UserError(
                f"distributed.survive is true, which does not support {device.type} yet: set distributed.backend to "
                "gloo, or distributed.survive to false"
            )
        return device

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
        first = f"prepared/{self.calls}/"
        on_this_host = f"prepared/{self.calls}/{platform.node()}"
        if self.launch_rank > 0:
            self._wait_for(first)
            if self.local_rank > 0:
                self._wait_for(on_this_host)
        yield
        if self.launch_rank == 0:
            self.store.set(first, "")
        if self.local_rank == 0:
            self.store.set(on_this_host, "")

    def _wait_for(self, key: str) -> None:
        deadline = self._deadline()
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise UserError(
                    f"distributed.timeout_seconds is {self.timeout.total_seconds():g}, in which "
                    "rank 0 has not prepared the text for the others: see its messages, or raise it"
                )
            time.sleep(POLL_SECONDS)

    # Collectives

    def all_gather_object(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        self.calls += 1
        prefix = f"object/{self.view}/{self.calls}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(value))
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        deadline = self._deadline()
        while not self.store.check(keys):
            self._check(deadline)
            time.sleep(POLL_SECONDS)
        return [json.loads(answer) for answer in self.store.multi_get(keys)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            self.run(lambda group: group.allreduce([tensor]))
        return tensor

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        self.run(lambda group: group._allgather_base(gathered, tensor))

    def all_to_all(self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]) -> None:
        self.run(lambda group: group.alltoall_base(received, sent, received_rows, sent_rows))

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        if self.world_size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            self.run(lambda group: group.broadcast([tensor], options))

    def all_reduce_flags(self, *values: int) -> "SurvivingFlags":
        """As in a DistributedContext; besides, the view ends with this step if somebody waits to join."""
        self.membership.check()
        if self.ends_view:
            self._end_view("a process has asked to join")
        self.flag_reductions += 1
        if self.flag_reductions == 3:
            tell_supervisor(TRAINED)
        return SurvivingFlags([*values, int(self.membership.has_joiners)], self)

    def run(self, start: Callable[[Any], dist.Work]) -> None:
        """Starts a collective with the group that it is given, and waits for it."""
        self.wait(self.start(start))

    def start(self, start: Callable[[Any], dist.Work]) -> dist.Work:
        self.membership.check()
        self.calls += 1
        try:
            return self.membership.group.start(start)
        except RuntimeError as error:
            self._end_view("a collective has failed", error)

    def wait(self, work: dist.Work) -> None:
        deadline = self._deadline()
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():  # another process is gone, or has left the view
                    self._end_view("a collective has failed", error)
            self._check(deadline)

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout.total_seconds()

    def _check(self, deadline: float) -> None:
        """Raises MembershipChanged if the view is over, and ends it after the deadline."""
        self.membership.check()
        if time.monotonic() > deadline:
            self.membership.end_late_view()
            raise MembershipChanged

    def _end_view(self, reason: str, error: RuntimeError | None = None) -> NoReturn:
        self.membership.liveness.look_now()
        self.membership.end_view(reason)
        raise MembershipChanged from error

    # The end of the run

    def is_reported(self, message: str) -> bool:
        """Whether another process reports this error; this one does if it is the first that asks."""
        key = f"reported/{sha256(message.encode(errors='replace')).hexdigest()}"
        with suppress(RuntimeError, OSError):
            return self.store.compare_set(key, "", self.membership.label).decode() != self.membership.label
        return False

    def has_failed_for_all(self, error: Exception) -> bool:
        """Whether the run must end with this error, else only this process."""
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        digest = sha256("\n".join([type(error).__name__, *places]).encode()).hexdigest()
        try:
            return self.membership.has_failed_for_all(self.launch_rank, digest)
        except (RuntimeError, OSError):  # the store is gone
            return True

    def is_member(self) -> bool:
        """Whether the other processes have not gone on without this one, which may not know it."""
        with suppress(RuntimeError, OSError):
            return not self.membership.is_left_out()
        return True

    def metrics(self) -> dict[str, int]:
        return {**super().metrics(), "view": self.view}

    def exchange_messages(self, ranks: Any, message: str) -> dict[int, str]:
        """Rank 0 sends its message to all others, which wait for it as long as rank 0 is a member."""
        with suppress(RuntimeError, OSError):  # without a store, there is nothing to wait for
            if self.rank == 0:
                end_run(self.store, message, self.exit_status)
            while (end := read_end(self.store)) is None:
                self.membership.check()
                time.sleep(POLL_SECONDS)
            save_error, _ = end
            return {0: save_error}
        return {self.rank: message}


class SurvivingFlags(PendingFlags):
    """Flags reduced in a view; the last one says whether a process waits to join."""

    def __init__(self, values: Sequence[int], context: SurvivingContext) -> None:
        self.context = context
        self.tensor = torch.tensor(values, dtype=torch.int32)
        self.work: dist.Work | None = None
        if context.world_size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self.work = context.start(lambda group: group.allreduce([self.tensor], options))

    def wait(self) -> list[int]:
        if self.work is not None:
            self.context.wait(self.work)
        *maxima, joiners = self.tensor.tolist()
        self.context.ends_view = bool(joiners)
        return maxima


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
        select_gloo_interface(dist.PrefixStore("network", store), info.rank, info.world_size, init_method)
        address = local_address(dist.PrefixStore("network", store), info.world_size, host)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"rank {info.rank} of {info.world_size} on {platform.node()} found no store at {host}:{port} "
            f"(distributed.timeout_seconds is {timeout.total_seconds():g}): {error}; are all {info.world_size} "
            "processes started, and does this address lead to the first one?"
        ) from error
    context = SurvivingContext(info, config.distributed, store, address)
    try:
        validate(config, info.world_size)
        yield context
    except UserError as error:
        error.is_reported = context.is_reported(str(error))
        raise
    except (PeerError, RunEnded):
        raise
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        tell_supervisor(FAILED)
        raise PeerError(f"the store at {host}:{port} is gone, or cut off from rank {info.rank}") from error
    except Exception as error:
        if context.has_failed_for_all(error):
            tell_supervisor(FAILED)
            raise
        if is_oom_error(error):  # which would end the run, with advice for all ranks
            raise MemoryError(str(error)) from error
        raise
    finally:
        context.membership.leave()
