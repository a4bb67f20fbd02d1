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
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from char_dataset import CharDataset, ValidationDataset, hash64
from mingpt.distributed.process_group import DistributedContext
from mingpt.optimizer import build_optimizer, newton_schulz
from mingpt.utils.device import seed_device
from model import GPT, Stage

if TYPE_CHECKING:
    from mingpt.config import Config

State = dict[str, dict[str, Tensor]]  # the optimizer's tensors by parameter and name
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy:
    """Each rank holds everything, and they exchange nothing: one process alone, and what the others have in common.

    Attributes:
        model: what micro-batches go through
        whole: the model for all ranks to call together, as `generation.stream` does
        parameters: as this rank holds them, by GPT-2's names
        shapes: by the same names, tensors of the whole model's shapes
        optimizer: whose step moves them all
        stepper: the optimizer that moves those which this rank is to move, and has their state
        scaler: of losses, where gradients are fp16
        factor: multiplies losses before backward
        facts: what the banner says of it
        parts: whether a rank holds only a part of something, so that `state` needs all of them
        device: where parameters stay between steps
        newton_schulz: what makes Muon's products

    Args:
        model: on the meta device; its weights are anything until `take`
        world: the ranks
        config: all sections
        precision: of matrix products: fp32, bf16 or fp16
        device: where parameters stay; None: on the rank's device
    """

    factor = 1.0
    parts = False
    facts: Mapping[str, str] = {}
    model: nn.Module
    whole: GPT
    newton_schulz = staticmethod(newton_schulz)

    def __init__(
        self,
        model: Stage,
        context: DistributedContext,
        config: Config,
        precision: str,
        device: torch.device | None = None,
    ) -> None:
        self.context, self.config, self.dtype, self.device = (
            context,
            config,
            DTYPES[precision],
            device or context.device,
        )
        self.model = self.whole = model.to_empty(device=self.device)  # type: ignore[assignment]
        self.parameters = self.shapes = dict(model.named_parameters())
        self.optimizer = self.stepper = build_optimizer(model, config.optimizer, self.dtype, self.newton_schulz)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=precision == "fp16")

    def backward(self, batch: range, data: CharDataset) -> list[Tensor]:
        """Leaves in parameters' `grad` the gradient of the whole batch's mean loss, as far as this rank holds it.

        Args:
            batch: sample numbers, of all ranks together
            data: the samples

        Returns:
            this rank's parts of that loss, for `mean`
        """
        losses, portions = [], self.micro_batches(batch)
        for i, (numbers, weight) in enumerate(portions, start=1):
            seed_device(self.context.device, self.seed(numbers.start))
            with self.micro_batch(last=i == len(portions)):
                loss = self.loss(self.model, *data[numbers]) * weight
                self.scaler.scale(loss * self.factor).backward()
            losses.append(loss.detach())
        self.finish()
        return losses

    def micro_batches(self, batch: range) -> list[tuple[range, float]]:
        """This rank's sample numbers in portions, and each portion's weight in the mean over the whole batch.

        Every rank gets equally many, that of the largest share; a missing one is a dummy of weight zero.
        """
        share, largest = self.context.shard_range(batch.start, len(batch)), self.context.max_shard_size(len(batch))
        size = self.config.trainer.micro_batch_size or largest
        portions = (share[start : start + size] for start in range(0, largest, size))
        return [(numbers or batch[:1], len(numbers) / len(batch)) for numbers in portions]

    def seed(self, first: int) -> int:
        """Of dropout's random numbers in the portion that begins with this sample."""
        return int(hash64(self.config.trainer.seed, first)[0])

    def loss(self, model: nn.Module, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of (B, T) inputs and targets, on the device and in the precision of this run."""
        idx, targets = self.on_device(idx), self.on_device(targets)
        with self.autocast():
            return model(idx, targets)[1]

    def on_device(self, tensor: Tensor) -> Tensor:
        """Copied there from pinned memory, for which nothing waits."""
        device = self.context.device
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    def autocast(self) -> torch.autocast:
        """Around each forward pass: matrix products in the precision of this run."""
        return torch.autocast(self.context.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @torch.no_grad()
    def losses(self, batches: list[range], data: ValidationDataset) -> Tensor:
        """Each batch's mean loss, (len(batches),), on all ranks; batches are dealt out.

        Every rank makes equally many forward passes, as sharded strategies need.
        """
        losses, size = torch.zeros(len(batches), device=self.context.device), self.context.world_size
        self.whole.eval()
        for start in range(0, len(batches), size):
            mine = start + self.context.rank
            loss = self.loss(self.whole, *data[batches[mine if mine < len(batches) else 0]])
            if mine < len(batches):
                losses[mine] = loss
        self.whole.train()
        return self.context.all_reduce(losses)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of each portion; `last` tells that it is the step's last on this rank."""
        yield

    def finish(self) -> None:
        """After the last portion: parameters' `grad` is the mean over the whole batch, as far as this rank holds it."""

    def mean(self, parts: list[Tensor]) -> Tensor:
        """The whole batch's mean loss, from the weighted losses of each rank's portions."""
        return self.context.all_reduce(torch.stack(parts).sum())

    def clip(self, longest: float | None) -> Tensor:
        """Shortens the gradient to a global norm of `longest`; returns the norm it had, the same on all ranks."""
        norm = self.norm(self.parameters)
        if longest is not None:
            clip_grads_with_norm_(self.parameters.values(), longest, norm)
        return norm

    def norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The gradient's, over these parameters of all ranks'."""
        return get_total_norm([parameter.grad for parameter in parameters.values() if parameter.grad is not None])

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
        layout = self.context.broadcast_object(layout, source)
        for name, shape in self.shapes.items():
            self.put(name, "", self._receive(weights.get(name), shape, source))
            for key, like in layout.get(name, {}).items():
                self.put(name, key, self._receive(state.get(name, {}).get(key), like, source))

    def put(self, name: str, key: str, whole: Tensor) -> None:
        """Takes this rank's part of a parameter, or, where there is a key, of its optimizer state of that name."""
        parameter = self.parameters[name]
        if not key:
            parameter.copy_(self._part(whole, parameter))
        elif self._moves(parameter):
            self.stepper.state[parameter][key] = self._part(whole, parameter)

    def _receive(self, tensor: Tensor | None, like: Tensor, source: int) -> Tensor:
        whole = torch.empty(like.shape, dtype=like.dtype, device=self.context.device)
        if tensor is not None and self.context.rank == source:
            whole.copy_(tensor)
        self.context.broadcast_tensor(whole, source)
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
        warm_up: this -> a number that depends on all parameters, for the throw-away step
    """

    def __init__(
        self,
        model: Stage,
        context: DistributedContext,
        config: Config,
        precision: str,
        warm_up: Callable[[Strategy], Tensor],
    ) -> None:
        super().__init__(model, context, config, precision)
        self.factor = context.world_size  # DDP averages over ranks
        torch._foreach_zero_([parameter.detach() for parameter in self.parameters.values()])
        self.model = self.ddp = DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            process_group=context.group,
            bucket_cap_mb=config.distributed.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        warm_up(self).backward()
        self.model.zero_grad(set_to_none=True)
        context.exit_callbacks.append(self._let_go)

    def _let_go(self) -> None:
        # Who holds the group last ends it. DDP's C++ part would do so with Python's lock in hand, and wait for ever for
        # gloo's thread, which wants that lock to free a tensor (torch 2.13).
        del self.model, self.ddp

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients leave this rank in the last one only."""
        self.ddp.require_backward_grad_sync = last  # what DDP's no_sync sets
        yield
