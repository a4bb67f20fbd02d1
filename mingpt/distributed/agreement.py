"""Lets ranks agree on values and errors, which they exchange as JSON on the CPU."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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

    group: dist.ProcessGroup | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def reduce_object(ranks: RankGroup, value: T, combine: Callable[[list[T]], R]) -> R:
    """Returns the result of `combine` for the values of all ranks, in rank order.

    Values must be serializable to JSON. With several ranks, tuples become lists.
    """
    if ranks.world_size == 1:
        return combine([value])
    # JSON instead of pickle, which would run code from any process that connects to a rank's port.
    message = json.dumps(value).encode()
    size = max(map(int, _all_gather(ranks, torch.tensor([len(message)]))))
    rows = _all_gather(ranks, torch.frombuffer(bytearray(message.ljust(size)), dtype=torch.uint8))
    return combine([json.loads(row.numpy().tobytes()) for row in rows])


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
    for rank, other in enumerate(all_gather_object(ranks, message)):
        if other is not None:
            raise UserError(f"rank {rank}: {other}" if rank else other)


def _all_gather(ranks: RankGroup, tensor: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(ranks.world_size)]
    dist.all_gather(rows, tensor, group=ranks.group)
    return rows


def _first_difference(values: Sequence[dict[str, Any]]) -> str | None:
    first, *others = values
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                return f"{name} differs between ranks: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
    return None
