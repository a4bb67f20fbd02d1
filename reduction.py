"""How do the gradients of a batch become one? Over micro-batches and over ranks: fast, or always in the same order.

fast is DistributedDataParallel: each rank adds up its micro-batches, and the backend's all-reduce adds up the ranks
while backward is still running. Which additions are made, and so the last bits, depends on the number of ranks.

tree makes the same additions at every number of ranks. Micro-batches have fixed bounds, their gradients are the leaves
of one binary tree, and each node is the sum of its two halves wherever the leaves were computed. A rank adds up the
whole subtrees among its neighbouring leaves while they come, like a binary counter. Then each rank finishes the tree
for its slice of the gradient alone (a reduce-scatter in which the order is ours), and slices are gathered: where ranks
are a power of two and share the leaves evenly, each sends as much as a ring all-reduce would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed import World


class Reduction(Protocol):
    """What the trainer needs of either.

    Attributes `model` is what micro-batches go through, and `factor` multiplies their losses before backward.
    """

    model: nn.Module
    factor: int

    def micro_batches(self, first: int, count: int, size: int | None) -> list[tuple[range, float]]:
        """This rank's sample numbers in portions, and each portion's weight in the mean over the whole batch.

        Args:
            first: number of the batch's first sample
            count: samples in the batch, all ranks together
            size: most samples in a portion; None: the whole share
        """

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of each portion; `last` tells that it is the step's last on this rank."""

    def finish(self) -> None:
        """After the last portion: parameters' `grad` is the mean over the whole batch, the same on all ranks."""

    def mean(self, parts: list[Tensor]) -> Tensor:
        """The whole batch's mean loss, from the weighted losses of each rank's portions."""


class Fast:
    """DistributedDataParallel's buckets and the backend's all-reduce.

    DDP lays out its buckets anew after the first backward, and from three ranks on the layout decides the last bits of
    each sum. One throw-away step, here and on resume alike, makes it the same in every step that counts.

    Args:
        model: on its device
        world: the ranks
        bucket_cap_mb: MiB of gradients that are sent at a time
        warm_up: model -> a loss that depends on all parameters, for the throw-away step
    """

    def __init__(
        self, model: nn.Module, world: World, bucket_cap_mb: float, warm_up: Callable[[nn.Module], Tensor]
    ) -> None:
        self.model, self.world = model, world
        self.factor = world.size  # DDP averages over ranks
        if world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            self.model = DistributedDataParallel(
                model, device_ids=devices, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
            )
            warm_up(self.model).backward()
            self.model.zero_grad(set_to_none=True)

    def micro_batches(self, first: int, count: int, size: int | None) -> list[tuple[range, float]]:
        """Every rank gets equally many, that of the largest share; a missing one is a dummy of weight zero."""
        share, largest = self.world.share(first, count), self.world.largest_share(count)
        portions = (share[start : start + (size or largest)] for start in range(0, largest, size or largest))
        return [(numbers or range(first, first + 1), len(numbers) / count) for numbers in portions]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients leave this rank in the last one only."""
        with nullcontext() if last or self.world.size == 1 else self.model.no_sync():  # type: ignore[operator]
            yield

    def finish(self) -> None:
        """Backward has done it all."""

    def mean(self, parts: list[Tensor]) -> Tensor:
        """A sum over ranks."""
        return self.world.sum(torch.stack(parts).sum())


class Tree:
    """The same additions in the same order, at any number of ranks up to that of micro-batches.

    Args:
        model: on its device, with the same weights on all ranks
        world: the ranks
    """

    factor = 1

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.parameters = list(model.parameters())

    def micro_batches(self, first: int, count: int, size: int | None) -> list[tuple[range, float]]:
        """Whole micro-batches, whose bounds no number of ranks moves."""
        if size is None:
            raise ValueError("the tree's micro-batches need a size")
        self.leaves = -(-count // size)
        self.mine = self.world.share(0, self.leaves)
        self.ahead, self.sums = iter(self.mine), Subtrees(self.leaves)
        starts = [first + size * leaf for leaf in self.mine]
        portions = [range(start, min(start + size, first + count)) for start in starts]
        return [(numbers, len(numbers) / count) for numbers in portions]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Takes its gradient into the tree."""
        yield
        leaf = next(self.ahead)
        self.sums.add(range(leaf, leaf + 1), torch.cat([p.grad.flatten() for p in self.parameters]))  # type: ignore[union-attr]
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Adds up what is left to add between ranks."""
        gradient = self._between_ranks() if self.world.size > 1 else self.sums.nodes[0][1]
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, gradient.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def _between_ranks(self) -> Tensor:
        size, total = self.world.size, sum(parameter.numel() for parameter in self.parameters)
        spans = [whole_subtrees(self.world.share(0, self.leaves, rank), self.leaves) for rank in range(size)]
        slice_size = -(-total // size)
        rows = torch.zeros(len(self.sums.nodes), size * slice_size, device=self.world.device)
        for row, (_, value) in zip(rows, self.sums.nodes, strict=True):
            row[:total] = value
        sent = rows.view(-1, size, slice_size).transpose(0, 1).reshape(-1, slice_size)  # rank by rank, each its slices
        received = sent.new_empty(sum(map(len, spans)), slice_size)
        dist.all_to_all_single(received, sent, [len(span) for span in spans], [len(rows)] * size)
        finished = Subtrees(self.leaves)
        for leaves, value in zip((leaves for span in spans for leaves in span), received, strict=True):
            finished.add(leaves, value)
        gradient = rows.new_empty(size * slice_size)
        dist.all_gather_single(gradient, finished.nodes[0][1])
        return gradient[:total]

    def mean(self, parts: list[Tensor]) -> Tensor:
        """Each portion's loss travels on its own and they are added in order."""
        losses = torch.zeros(self.leaves, device=self.world.device)
        if parts:
            losses[self.mine.start : self.mine.stop] = torch.stack(parts)
        return self.world.sum(losses).sum()


class Subtrees:
    """Sums over runs of neighbouring leaves, each a whole node of the binary tree over all leaves, left to right.

    Node k of level l is over leaves k 2**l to (k + 1) 2**l, as far as there are so many: its sum is that of its left
    half plus that of its right half.

    Args:
        count: leaves of the whole tree
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.nodes: list[tuple[range, Tensor]] = []

    def add(self, leaves: range, value: Tensor) -> None:
        """Takes the next node to the right, and adds up halves of one node as soon as both are there, in place."""
        self.nodes.append((leaves, value))
        while len(self.nodes) > 1 and _are_halves(self.nodes[-2][0], self.nodes[-1][0], self.count):
            (right, value), (left, total) = self.nodes.pop(), self.nodes.pop()
            self.nodes.append((range(left.start, right.stop), total.add_(value)))


def _are_halves(left: range, right: range, count: int) -> bool:
    return left.start % (2 * len(left)) == 0 and right.stop == min(left.start + 2 * len(left), count)


@lru_cache
def whole_subtrees(leaves: range, count: int) -> list[range]:
    """The nodes that a rank with these leaves ends up with, of the tree over `count` leaves."""
    sums = Subtrees(count)
    for leaf in leaves:
        sums.add(range(leaf, leaf + 1), torch.zeros(()))
    return [node for node, _ in sums.nodes]
