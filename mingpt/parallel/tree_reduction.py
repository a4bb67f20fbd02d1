"""Tree reduction: gradients that are bitwise identical for any number of ranks.

A backend's order of additions depends on the number of ranks, and the last bits of a sum depend on the order. Here,
micro-batches have fixed bounds, their gradients are the leaves of one binary tree, and each node is the sum of its two
children, whichever ranks computed the leaves. Each rank adds up complete subtrees of its consecutive leaves as they
arrive, like a binary counter. Then the ranks broadcast these sums, and each rank completes the tree. Unlike those of a
ring all-reduce, the bytes grow with the number of ranks.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mingpt.distributed.context import PendingNumbers
from mingpt.parallel.strategy import MicroBatch, Strategy


class Node(NamedTuple):
    """The sum over a range of consecutive leaves."""

    leaves: range
    value: Tensor


class TreeReduction(Strategy):
    """Each rank has the full model, and gradients are summed by the same additions for any number of ranks."""

    def shares(self, batch: range) -> list[range]:
        """Returns the sample numbers of this rank's micro-batches, with the same bounds on any number of ranks."""
        size = self.config.trainer.micro_batch_size or len(batch)  # conflicts.py refuses null
        leaves = [batch[start : start + size] for start in range(0, len(batch), size)]
        self.num_leaves = len(leaves)
        return [leaves[number] for number in self.context.shard(range(self.num_leaves))]

    def forward_backward(self, micro_batches: list[MicroBatch], target_counts: PendingNumbers) -> list[Tensor]:
        """Adds up the gradients and losses of all micro-batches in the tree. Returns the mean loss over the batch."""
        nodes: list[Node] = []  # sums of this rank's leaves
        for leaf, micro_batch in zip(self.context.shard(range(self.num_leaves)), micro_batches, strict=True):
            loss = self.accumulate(micro_batch, target_counts)
            self.check_gradients()
            gradients = [gradient.flatten() for gradient in self.gradients.values()]
            add_node(nodes, range(leaf, leaf + 1), torch.cat([*gradients, loss[None]]), self.num_leaves)
            self.zero_grad()
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in trained]
        total = self._reduce(nodes, sum(sizes) + 1, self.num_leaves)
        *gradients, loss = total.split([*sizes, 1])
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return [loss[0].clone()]  # a view would keep the gradient's memory

    def _reduce(self, nodes: list[Node], length: int, num_leaves: int) -> Tensor:
        """Broadcasts the sums of each rank, from left to right, and completes the tree on all ranks.

        Args:
            nodes: sums of this rank's leaves; empty if it does not have leaves
            length: length of each leaf's tensor
        """
        tree: list[Node] = []
        mine = iter(nodes)
        for rank in range(self.context.world_size):
            for leaves in subtree_ranges(self.context.shard(range(num_leaves), rank), num_leaves):
                value = torch.empty(length, device=self.context.device)
                if rank == self.context.rank:
                    value = next(mine).value
                self.context.broadcast_tensor(value, rank)
                add_node(tree, leaves, value, num_leaves)
        return tree[0].value

    def mean_loss(self, losses: list[Tensor]) -> Tensor:
        return losses[0]


def add_node(nodes: list[Node], leaves: range, value: Tensor, num_leaves: int) -> None:
    """Appends the next node to the right, and adds siblings, in place, as soon as both exist.

    Node k of level l covers the existing leaves from k 2**l to (k + 1) 2**l. Its sum is the sum of its left child plus
    the sum of its right child.

    Args:
        nodes: complete nodes of the binary tree, from left to right
        num_leaves: number of leaves of the whole tree
    """
    while nodes and _are_siblings(nodes[-1].leaves, leaves, num_leaves):
        left = nodes.pop()
        leaves = range(left.leaves.start, leaves.stop)
        value = left.value.add_(value)
    nodes.append(Node(leaves, value))


def _are_siblings(left: range, right: range, num_leaves: int) -> bool:
    parent_size = 2 * len(left)
    return left.start % parent_size == 0 and right.stop == min(left.start + parent_size, num_leaves)


@cache
def subtree_ranges(leaves: range, num_leaves: int) -> list[range]:
    """Returns the leaves of each subtree that a rank with these leaves adds up, in a tree with `num_leaves`."""
    nodes: list[Node] = []
    for leaf in leaves:
        add_node(nodes, range(leaf, leaf + 1), torch.zeros(()), num_leaves)
    return [node.leaves for node in nodes]
