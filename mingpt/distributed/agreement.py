"""Lets ranks agree on values and errors, which they exchange as JSON on the CPU."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.distributed.position import find_place
from mingpt.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


class RankGroup:
    """Ranks that exchange objects.

    Attributes:
        rank: number of this process in the group
        world_size: number of processes in the group
        group: their process group; None: all ranks, or a single process, which needs no process group
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group


def reduce_object(ranks: RankGroup, value: T, combine: Callable[[list[T]], R]) -> R:
    """Returns the result of `combine` for the values of all ranks, in rank order. Rank 0 computes it.

    Values and result must be serializable to JSON. With several ranks, tuples become lists.

    Raises:
        ValueError: on rank 0, if ranks call this in different places, since their values do not belong together.
    """
    if ranks.world_size == 1:
        return combine([value])
    place = {"the place of an exchange": find_place(sys._getframe())}
    # JSON instead of pickle, which would run code from any process that connects to a rank's port.
    message = json.dumps([place, value])
    sizes = _gather_on_rank0(ranks, torch.tensor([len(message)]))
    largest = _take_from_rank0(ranks, torch.tensor([max(map(int, sizes), default=0)]))
    rows = _gather_on_rank0(ranks, _encode(message, int(largest)))
    answer = ""
    if ranks.rank == 0:
        places, values = zip(*map(_decode, rows), strict=True)
        if difference := _first_difference(places):
            raise ValueError(difference)  # which the HealthMonitors of the other ranks report
        answer = json.dumps(combine(list(values)))
    size = _take_from_rank0(ranks, torch.tensor([len(answer)]))
    return _decode(_take_from_rank0(ranks, _encode(answer, int(size))))


def all_gather_object(ranks: RankGroup, value: T) -> list[T]:
    """Returns the values of all ranks, in rank order. See `reduce_object`."""
    return reduce_object(ranks, value, list)


def broadcast_object(ranks: RankGroup, value: T, source: int = 0) -> T:
    """Returns the source rank's value. See `reduce_object`."""
    sent = value if ranks.rank == source else None
    return reduce_object(ranks, sent, lambda values: values[source])  # type: ignore[return-value]


def check_equal(
    ranks: RankGroup,
    values: Mapping[str, Any],
    *,
    advice: str = "start all of them with the same code, text, yaml and options",
) -> None:
    """Checks that all ranks pass the same values, by name.

    Raises:
        UserError: on all ranks, with the rank, the name, both values and `advice`.
    """
    difference = reduce_object(ranks, dict(values), _first_difference)
    if difference is not None:
        raise UserError(f"{difference}; {advice}")


@contextmanager
def shared_errors(ranks: RankGroup) -> Iterator[None]:
    """Raises a UserError on all ranks if the block raises one on any of them.

    Raises:
        UserError: on all ranks, with the message of the first rank that has one.
    """
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    first = reduce_object(ranks, message, _first_error)
    if first is not None:
        raise UserError(first)


def _gather_on_rank0(ranks: RankGroup, tensor: Tensor) -> list[Tensor]:
    """Returns the tensors of all ranks on rank 0, and an empty list on the other ranks.

    Like `_take_from_rank0`, it uses a collective that nothing else uses. If ranks were in different collectives of the
    same kind, gloo would match them, or end the process if their sizes differ.
    """
    rows = [torch.empty_like(tensor) for _ in range(ranks.world_size)] if ranks.rank == 0 else None
    dist.gather(tensor, rows, group_dst=0, group=ranks.group)
    return rows or []


def _take_from_rank0(ranks: RankGroup, tensor: Tensor) -> Tensor:
    """Returns rank 0's tensor on all ranks, which pass tensors of the same shape."""
    received = torch.empty_like(tensor)
    copies = [tensor] * ranks.world_size if ranks.rank == 0 else None
    dist.scatter(received, copies, group_src=0, group=ranks.group)
    return received


def _encode(text: str, size: int) -> Tensor:
    """Returns ASCII text as a tensor, (size,), padded with spaces, which JSON ignores."""
    return torch.frombuffer(bytearray(text.ljust(size).encode()), dtype=torch.uint8)


def _decode(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _first_error(messages: list[str | None]) -> str | None:
    for rank, message in enumerate(messages):
        if message is not None:
            return f"rank {rank}: {message}" if rank else message
    return None


def _first_difference(values: Sequence[dict[str, Any]]) -> str | None:
    first, *others = values
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                return f"{name} differs between ranks: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
    return None
