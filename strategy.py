"""What does each rank hold, and what do ranks exchange? One line of yaml: ddp, zero1, zero2 or fsdp.

        parameters           gradients   optimizer state   sent in a step
ddp     whole                whole       whole             gradients, all-reduced in buckets while backward goes on
zero1   whole                whole       a part            the same, then the parameters that each rank has moved
zero2   a part; whole from   a part      a part            parameters once, gradients (reduce-scatter)
        forward to backward
fsdp    a part; whole one    a part      a part            parameters twice, gradients (reduce-scatter)
        block at a time

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stages 1 to 3); Zhao
et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

Whatever the strategy, all ranks make equally many forward passes: sharded ones gather in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from distributed import World
from optimizer import OptimizerConfig, build_optimizer, orthogonal

State = dict[str, dict[str, Tensor]]  # the optimizer's tensors by parameter and name


class Strategy:
    """Each rank holds everything, and they exchange nothing: one process alone, and what the others have in common.

    Attributes:
        model: what micro-batches go through
        parameters: as this rank holds them, by GPT-2's names
        optimizer: whose step moves them all
        stepper: the optimizer that moves those which this rank is to move, and has their state
        factor: multiplies losses before backward
        parts: whether a rank holds only a part of something, so that `state` needs all of them
        device: where parameters stay between steps
        orthogonal: what makes Muon's products

    Args:
        model: on the meta device; its weights are anything until `take`
        world: the ranks
        optimizer: how weights move
        dtype: of matrix products
        device: where parameters stay; None: on the rank's device
    """

    factor = 1
    parts = False
    orthogonal = staticmethod(orthogonal)

    def __init__(
        self,
        model: nn.Module,
        world: World,
        optimizer: OptimizerConfig,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.world, self.device = world, device or world.device
        self.model = model.to_empty(device=self.device)
        self.parameters = dict(model.named_parameters())
        self.optimizer = self.stepper = build_optimizer(model, optimizer, dtype, self.orthogonal)

    def micro_batches(self, first: int, count: int, size: int | None) -> list[tuple[range, float]]:
        """This rank's sample numbers in portions, and each portion's weight in the mean over the whole batch.

        Every rank gets equally many, that of the largest share; a missing one is a dummy of weight zero.

        Args:
            first: number of the batch's first sample
            count: samples in the batch, all ranks together
            size: most samples in a portion; None: the whole share
        """
        share, largest = self.world.share(first, count), self.world.largest_share(count)
        portions = (share[start : start + (size or largest)] for start in range(0, largest, size or largest))
        return [(numbers or range(first, first + 1), len(numbers) / count) for numbers in portions]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of each portion; `last` tells that it is the step's last on this rank."""
        yield

    def finish(self) -> None:
        """After the last portion: parameters' `grad` is the mean over the whole batch, as far as this rank holds it."""

    def mean(self, parts: list[Tensor]) -> Tensor:
        """The whole batch's mean loss, from the weighted losses of each rank's portions."""
        return self.world.sum(torch.stack(parts).sum())

    def clip(self, longest: float | None) -> Tensor:
        """Shortens the gradient to a global norm of `longest`; returns the norm it had, the same on all ranks."""
        norm = self._norm([parameter.grad for parameter in self.parameters.values() if parameter.grad is not None])
        if longest is not None:
            clip_grads_with_norm_(self.parameters.values(), longest, norm)
        return norm

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return get_total_norm(gradients)

    def state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each parameter's name, its weight and its optimizer state, both whole. All ranks go through it together.

        A tensor may be the one that the next step changes.
        """
        for name, parameter in self.parameters.items():
            yield name, parameter.detach(), dict(self.stepper.state[parameter])

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor], state: State, source: int) -> None:
        """Takes over, on all ranks, weights and optimizer state that rank `source` has; one tensor at a time is whole.

        Args:
            weights: whole, by name; elsewhere than on `source` they are not looked at
            state: the optimizer's tensors, whole, by name
            source: whose they are
        """
        layout = {name: {key: tensor.to("meta") for key, tensor in tensors.items()} for name, tensors in state.items()}
        layout = self.world.broadcast(layout, source)
        for name, parameter in self.parameters.items():
            parameter.copy_(self._part(self._receive(weights.get(name), parameter, source), parameter))
            for key, like in layout.get(name, {}).items():
                whole = self._receive(state.get(name, {}).get(key), like, source)
                if self._moves(parameter):
                    self.stepper.state[parameter][key] = self._part(whole, parameter)

    def _receive(self, tensor: Tensor | None, like: Tensor, source: int) -> Tensor:
        whole = torch.empty(like.shape, dtype=like.dtype, device=self.world.device)
        if tensor is not None and self.world.rank == source:
            whole.copy_(tensor)
        self.world.send(whole, source)
        return whole

    def _part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """What this rank holds of a tensor that belongs to the parameter."""
        return whole

    def _moves(self, parameter: Tensor) -> bool:
        return True


class DDP(Strategy):
    """DistributedDataParallel: whole copies, and gradients averaged in buckets.

    DDP lays out its buckets anew after the first backward, and from three ranks on the layout decides the last bits of
    each sum. One throw-away step, here and on resume alike, makes it the same in every step that counts.

    Args:
        bucket_cap_mb: MiB of gradients that are sent at a time
        warm_up: model -> a loss that depends on all parameters, for the throw-away step
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        optimizer: OptimizerConfig,
        dtype: torch.dtype,
        bucket_cap_mb: float,
        warm_up: Callable[[nn.Module], Tensor],
    ) -> None:
        super().__init__(model, world, optimizer, dtype)
        self.factor = world.size  # DDP averages over ranks
        torch._foreach_zero_([parameter.detach() for parameter in self.parameters.values()])
        self.model = self.ddp = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        warm_up(self.model).backward()
        self.model.zero_grad(set_to_none=True)
        world.before_leaving.append(self._let_go)

    def _let_go(self) -> None:
        # Who holds the group last ends it. DDP's C++ part would do so with Python's lock in hand, and wait for ever for
        # gloo's thread, which wants that lock to free a tensor (torch 2.13).
        del self.model, self.ddp

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients leave this rank in the last one only."""
        self.ddp.require_backward_grad_sync = last  # what DDP's no_sync sets
        yield
