"""Tree reduction: gradients that have the same bits at any number of ranks.

The order in which a backend sums over ranks, and so the last bits, depends on their number. Here micro-batches have
fixed bounds, their gradients are the leaves of one binary tree, and each node is the sum of its two children wherever
the leaves were computed. Each rank sums complete subtrees among its consecutive leaves as they arrive, like a binary
counter. Then each rank completes the tree for its slice of the gradient (a reduce-scatter with a fixed order), and
slices are gathered. With a power of two of ranks and even shares, each sends as much as in a ring all-reduce.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from mingpt.config import Config
from mingpt.distributed.process_group import DistributedContext
from mingpt.parallel.data_parallel import Strategy
from mingpt.parallel.memory import MemoryUsage
from mingpt.utils.device import device_kind
from mingpt.utils.errors import UserError
from mingpt.utils.logging import logger


class TreeReduction(Strategy):
    """Full replicas, whose gradients are summed by the same additions at any number of ranks."""

    needs_one_thread = True

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        super().__init__(model, context, config, precision)
        kinds = sorted(set(context.all_gather_object(device_kind(context.device))))
        if len(kinds) > 1:
            logger.info(f"ranks run on {' and '.join(kinds)}: distributed.reduction tree needs one kind for equal bits")

    @classmethod
    def validate(cls, config: Config, world_size: int) -> None:
        super().validate(config, world_size)
        batch_size, size = config.trainer.batch_size, config.trainer.micro_batch_size or config.trainer.batch_size
        if -(-batch_size // size) < world_size:
            raise UserError(
                f"trainer.batch_size / trainer.micro_batch_size is {batch_size} / {size}, fewer micro-batches than the "
                f"{world_size} ranks, and with distributed.reduction tree each needs one: lower "
                "trainer.micro_batch_size, or start fewer processes"
            )

    @classmethod
    def validate_device(cls, config: Config, device: torch.device, precision: str) -> None:
        if device.type == "cuda" and not config.trainer.deterministic:
            raise UserError("trainer.deterministic is false, must be true with distributed.reduction tree on GPUs")
        if precision == "fp16":
            raise UserError(
                "trainer.precision is fp16, kept from the snapshot; with distributed.reduction tree set bf16 or fp32"
            )

    @classmethod
    def estimate_memory(
        cls, config: Config, model: nn.Module, ranks: int, precision: str, activations: float
    ) -> MemoryUsage:
        usage = super().estimate_memory(config, model, ranks, precision, activations)
        share = -(-config.trainer.batch_size // ranks)
        micro_batches = -(-share // min(share, config.trainer.micro_batch_size or share))
        # The gradient of one micro-batch, and a partial sum per digit of a binary counter.
        return replace(usage, unsharded=usage.unsharded + usage.gradients * (1 + micro_batches.bit_length()))

    def micro_batches(self, batch: range) -> list[tuple[range, float]]:
        """This rank's micro-batches, whose bounds do not depend on the number of ranks."""
        size: int = self.config.trainer.micro_batch_size  # type: ignore[assignment]  # config.py requires a number
        self.num_leaves = -(-len(batch) // size)
        self.leaves = self.context.shard_range(0, self.num_leaves)
        self.remaining, self.sums = iter(self.leaves), PartialSums(self.num_leaves)
        ranges = [batch[size * leaf : size * (leaf + 1)] for leaf in self.leaves]
        return [(numbers, len(numbers) / len(batch)) for numbers in ranges]

    @contextmanager
    def gradient_sync(self, is_last: bool) -> Iterator[None]:
        """Adds the gradient of the micro-batch to the tree."""
        yield
        leaf, parameters = next(self.remaining), self.parameters.values()
        self.sums.add(range(leaf, leaf + 1), torch.cat([p.grad.flatten() for p in parameters]))  # type: ignore[union-attr]
        for parameter in parameters:
            parameter.grad = None

    def finish_gradients(self, losses: list[Tensor]) -> list[Tensor]:
        """Returns the losses of all micro-batches of all ranks, in order."""
        gradient, losses = self._reduce(losses) if self.context.world_size > 1 else (self.sums.nodes[0][1], losses)
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        for parameter, values in zip(self.parameters.values(), gradient.split(sizes), strict=True):
            parameter.grad = values.view_as(parameter)
        return losses

    def _reduce(self, losses: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Sums over ranks: all-to-all of slices, the upper part of the tree for one slice, all-gather.

        Each row has a column per micro-batch for its loss, so that a rank with the gradient has all losses too.
        """
        world_size, total = self.context.world_size, sum(p.numel() for p in self.parameters.values())
        shares = (self.context.shard_range(0, self.num_leaves, rank) for rank in range(world_size))
        subtrees = [subtree_ranges(leaves, self.num_leaves) for leaves in shares]
        slice_size = -(-(total + self.num_leaves) // world_size)
        rows = torch.zeros(len(self.sums.nodes), world_size * slice_size, device=self.context.device)
        for row, (leaves, value) in zip(rows, self.sums.nodes, strict=True):
            row[:total] = value
            first = leaves.start - self.leaves.start
            row[total + leaves.start : total + leaves.stop] = torch.stack(losses[first : first + len(leaves)])
        sent = rows.view(-1, world_size, slice_size).transpose(0, 1).reshape(-1, slice_size)  # the slices of each rank
        received = sent.new_empty(sum(map(len, subtrees)), slice_size)
        self.context.all_to_all(received, sent, list(map(len, subtrees)), [len(rows)] * world_size)
        tree = PartialSums(self.num_leaves)
        for leaves, value in zip((leaves for ranges in subtrees for leaves in ranges), received, strict=True):
            tree.add(leaves, value)
        gradient = rows.new_empty(world_size * slice_size)
        self.context.all_gather(gradient, tree.nodes[0][1])
        return gradient[:total], list(gradient[total : total + self.num_leaves].clone())  # which outlive the gradient

    def mean_loss(self, losses: list[Tensor]) -> Tensor:
        return torch.stack(losses).sum()


class PartialSums:
    """Sums over runs of consecutive leaves, each a complete node of the binary tree, from left to right.

    Node k of level l covers the leaves from k 2**l to (k + 1) 2**l, as far as they exist. Its sum is that of its left
    child plus that of its right child.
    """

    def __init__(self, num_leaves: int) -> None:
        self.num_leaves = num_leaves
        self.nodes: list[tuple[range, Tensor]] = []

    def add(self, leaves: range, value: Tensor) -> None:
        """Appends the next node to the right, and adds up siblings, in place, as soon as both exist."""
        self.nodes.append((leaves, value))
        while len(self.nodes) > 1 and self._are_siblings(self.nodes[-2][0], self.nodes[-1][0]):
            (right, value), (left, total) = self.nodes.pop(), self.nodes.pop()
            self.nodes.append((range(left.start, right.stop), total.add_(value)))

    def _are_siblings(self, left: range, right: range) -> bool:
        return left.start % (2 * len(left)) == 0 and right.stop == min(left.start + 2 * len(left), self.num_leaves)


@lru_cache
def subtree_ranges(leaves: range, num_leaves: int) -> list[range]:
    """The nodes that a rank with these leaves sums up, of a tree over `num_leaves`."""
    sums = PartialSums(num_leaves)
    for leaf in leaves:
        sums.add(range(leaf, leaf + 1), torch.zeros(()))
    return [node for node, _ in sums.nodes]
