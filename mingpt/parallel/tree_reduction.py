"""How do gradients become one by the same additions at every number of ranks?

A backend adds up ranks in an order that depends on how many there are, and so do the last bits. Here micro-batches have
fixed bounds, their gradients are the leaves of one binary tree, and each node is the sum of its two halves wherever the
leaves were computed. A rank adds up the whole subtrees among its neighbouring leaves while they come, like a binary
counter. Then each rank finishes the tree for its slice of the gradient alone (a reduce-scatter in which the order is
ours), and slices are gathered: where ranks are a power of two and share the leaves evenly, each sends as much as a ring
all-reduce would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.parallel.data_parallel import Strategy


class TreeReduction(Strategy):
    """The same additions in the same order, at any number of ranks up to that of micro-batches."""

    def micro_batches(self, batch: range) -> list[tuple[range, float]]:
        """Whole micro-batches, whose bounds no number of ranks moves."""
        size = self.config.trainer.micro_batch_size
        if size is None:
            raise ValueError("the tree's micro-batches need a size")
        self.leaves = -(-len(batch) // size)
        self.mine = self.context.shard_range(0, self.leaves)
        self.ahead, self.sums = iter(self.mine), PartialSums(self.leaves)
        portions = [batch[size * leaf : size * (leaf + 1)] for leaf in self.mine]
        return [(numbers, len(numbers) / len(batch)) for numbers in portions]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Takes its gradient into the tree."""
        yield
        leaf, parameters = next(self.ahead), self.parameters.values()
        self.sums.add(range(leaf, leaf + 1), torch.cat([p.grad.flatten() for p in parameters]))  # type: ignore[union-attr]
        for parameter in parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Adds up what is left to add between ranks."""
        gradient = self._between_ranks() if self.context.world_size > 1 else self.sums.nodes[0][1]
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        for parameter, part in zip(self.parameters.values(), gradient.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def _between_ranks(self) -> Tensor:
        size, total = self.context.world_size, sum(parameter.numel() for parameter in self.parameters.values())
        spans = [subtree_ranges(self.context.shard_range(0, self.leaves, rank), self.leaves) for rank in range(size)]
        slice_size = -(-total // size)
        rows = torch.zeros(len(self.sums.nodes), size * slice_size, device=self.context.device)
        for row, (_, value) in zip(rows, self.sums.nodes, strict=True):
            row[:total] = value
        sent = rows.view(-1, size, slice_size).transpose(0, 1).reshape(-1, slice_size)  # rank by rank, each its slices
        received = sent.new_empty(sum(map(len, spans)), slice_size)
        dist.all_to_all_single(received, sent, [len(span) for span in spans], [len(rows)] * size)
        finished = PartialSums(self.leaves)
        for leaves, value in zip((leaves for span in spans for leaves in span), received, strict=True):
            finished.add(leaves, value)
        gradient = rows.new_empty(size * slice_size)
        dist.all_gather_single(gradient, finished.nodes[0][1])
        return gradient[:total]

    def mean(self, parts: list[Tensor]) -> Tensor:
        """Each portion's loss travels on its own and they are added in order."""
        losses = torch.zeros(self.leaves, device=self.context.device)
        if parts:
            losses[self.mine.start : self.mine.stop] = torch.stack(parts)
        return self.context.all_reduce(losses).sum()


class PartialSums:
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
def subtree_ranges(leaves: range, count: int) -> list[range]:
    """The nodes that a rank with these leaves ends up with, of the tree over `count` leaves."""
    sums = PartialSums(count)
    for leaf in leaves:
        sums.add(range(leaf, leaf + 1), torch.zeros(()))
    return [node for node, _ in sums.nodes]
