"""Lets ranks agree on values and errors, which they exchange as JSON on the CPU."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.errors import UserError

T = TypeVar("T")


@dataclass
class RankGroup:
    """Ranks that exchange objects.

    Attributes:
        rank: number of this process in the group
        world_size: number of processes in the group
        group: their process group; None: all ranks, or a single process, which needs no process group
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None = None


def all_gather_object(ranks: RankGroup, value: T) -> list[T]:
    """Returns the values of all ranks, in rank order.

    Values must be serializable to JSON. With several ranks, tuples become lists.
    """
    if ranks.world_size == 1:
        return [value]
    # JSON instead of pickle, which would run code from any process that connects to a rank's port.
    message = json.dumps(value).encode()
    size = max(map(int, _all_gather(ranks, torch.tensor([len(message)]))))
    rows = _all_gather(ranks, torch.frombuffer(bytearray(message.ljust(size)), dtype=torch.uint8))
    return [json.loads(row.numpy().tobytes()) for row in rows]


def broadcast_object(ranks: RankGroup, value: T, source: int = 0) -> T:
    """Returns the source rank's value. See `all_gather_object`."""
    sent = value if ranks.rank == source else None
    return all_gather_object(ranks, sent)[source]  # type: ignore[return-value]


def check_equal(
    ranks: RankGroup,
    values: dict[str, Any],
    *,
    advice: str = "start all of them with the same code, text, yaml and options",
) -> None:
    """Checks that all ranks pass the same values, by name.

    Raises:
        UserError: on all ranks, with the rank, the name, both values and `advice`.
    """
    difference = _first_difference(all_gather_object(ranks, values))
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


def _first_difference(values: list[dict[str, Any]]) -> str | None:
    first, *others = values
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                return f"{name} differs between ranks: {first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
    return None
