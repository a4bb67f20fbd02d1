"""The rank and device of this process, its groups, and collectives of tensors."""

import faulthandler
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from datetime import timedelta
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.config.schema import DistributedConfig
from mingpt.distributed.agreement import RankGroup, all_gather_object, check_equal, shared_errors
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.rendezvous import machine_id
from mingpt.monitoring.logging import set_rank
from mingpt.system.device import choose_device

DEVICE_ADVICE = (
    "PyTorch sees no GPU on the ranks with cpu; check the driver there with nvidia-smi, or train on CPUs everywhere "
    "with --distributed.backend gloo"
)


class DistributedContext(RankGroup):
    """This process's rank and device, and collectives with the other ranks.

    Args:
        info: ranks from the launcher

    Raises:
        UserError: on all ranks, if only some of them have a GPU, or nccl does not have one.
    """

    exit_callbacks: ClassVar[list[Callable[[], None]]] = []  # called before the process group is destroyed

    def __init__(self, info: RankInfo, config: DistributedConfig) -> None:
        super().__init__(info.rank, info.world_size)
        self.restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # set by torchrun
        self.timeout = timedelta(seconds=config.timeout_seconds)
        machine = machine_id()
        machines = all_gather_object(self, machine)
        self.local_rank = machines[: self.rank].count(machine) if info.local_rank is None else info.local_rank
        set_rank(self.rank, self.local_rank)
        self.local_world_size = info.local_world_size or machines.count(machine)
        with shared_errors(self):
            self.device = choose_device(config.backend, self.local_rank, self.world_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        check_equal(self, {"the kind of device": self.device.type}, advice=DEVICE_ADVICE)

    def subgroup(self, groups: Iterable[Sequence[int]]) -> "DistributedContext":
        """Returns the context of the group that includes this rank. All ranks must list the same groups."""
        context = copy(self)
        lists = [list(ranks) for ranks in groups]
        context.group, _ = dist.new_subgroups_by_enumeration(lists, timeout=self.timeout)
        context.rank = dist.get_rank(context.group)
        context.world_size = dist.get_world_size(context.group)
        return context

    @property
    def backend(self) -> str:
        """The backend that reduces gradients."""
        if self.world_size == 1:
            return "none, one process"
        return "nccl" if self.device.type == "cuda" else "gloo"

    def shard(self, numbers: range, rank: int | None = None) -> range:
        """Returns a rank's shard of a range, by default this rank's. Sizes differ by at most one."""
        rank = self.rank if rank is None else rank
        count = len(numbers)
        return numbers[count * rank // self.world_size : count * (rank + 1) // self.world_size]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Overwrites the tensor with the source rank's tensor."""
        if self.world_size > 1:
            dist.broadcast(tensor, group_src=source, group=self.group)

    def begin_step(self, *numbers: int) -> "list[PendingNumbers]":
        """Starts to exchange integers, which all ranks must do. Returns, for each of them, the values of all ranks."""
        mine = torch.tensor(numbers)
        rows = mine[None]
        work = None
        if self.world_size > 1:
            # If ranks wait for one that hangs, all of them show where they are.
            seconds = self.timeout.total_seconds()
            faulthandler.dump_traceback_later(seconds, file=sys.__stderr__)  # type: ignore[arg-type]
            rows = mine.new_empty(self.world_size, len(mine))
            work = dist.all_gather(list(rows), mine, async_op=True)
        return [PendingNumbers(column, work) for column in rows.T]


class PendingNumbers(NamedTuple):
    """An integer of each rank, in an exchange that runs while the caller continues.

    gloo exchanges them on the CPU, so `wait` does not wait for a GPU.

    Attributes:
        values: of each rank; filled when `work` is done
        work: the exchange; None: there is only one rank
    """

    values: Tensor
    work: dist.Work | None

    def wait(self) -> list[int]:
        """Returns the values of all ranks, in rank order."""
        if self.work is not None:
            self.work.wait()
        return self.values.tolist()
