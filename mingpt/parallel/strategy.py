"""Strategies: what each rank holds and what ranks exchange. One process, and DistributedDataParallel.

        parameters           gradients   optimizer state   sent in a step
ddp     full                 full        full              gradients, all-reduced in buckets during backward
zero1   full                 full        a shard           the same, then the updated parameters of each rank
zero2   a shard; full from   a shard     a shard           parameters once, gradients (reduce-scatter)
        forward to backward
fsdp    a shard; one full    a shard     a shard           parameters twice, gradients (reduce-scatter)
        block at a time

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stages 1 to 3); Zhao
et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

With every strategy, all ranks make the same number of forward passes, because sharded ones gather parameters in each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from char_dataset import CharDataset, ValidationDataset
from mingpt.config.schema import Config
from mingpt.distributed.context import DistributedContext
from mingpt.optim.muon import newton_schulz
from mingpt.optim.optimizer import build_optimizer
from mingpt.parallel.full_state import FullState
from mingpt.system.device import seed_device
from mingpt.text.permutation import hash64

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MicroBatch:
    """The sequences that one rank puts through one forward pass."""

    indices: range  # sample numbers
    weight: float  # of their mean loss in the mean over the batch; 0: a dummy for a rank with a smaller share
    batch: range  # the batch that they belong to, of all ranks together
    sync_gradients: bool  # ranks exchange gradients in its backward pass: it is this rank's last one in the step


class Strategy(FullState):
    """One process that holds everything, and what all strategies have in common.

    Attributes:
        device: where parameters are between steps
        model: called with micro-batches
        full_model: called by all ranks together, for evaluation and generation
        optimizer: its step updates all parameters on all ranks
        scaler: gradient scaler, enabled in fp16
        description: rows for the summary at the start

    Args:
        model: on the meta device; its weights are undefined until `load_full_state`
        precision: fp32, bf16 or fp16
    """

    gradient_divide_factor = 1.0  # by which the exchange divides gradients; losses are multiplied by it
    needs_process_group = False  # also for one rank
    compiles_blocks = False  # trainer.compile compiles blocks, not the whole model
    newton_schulz = staticmethod(newton_schulz)

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        self.context = context
        self.config = config
        self.dtype = DTYPES[precision]
        self.device = torch.device("cpu") if config.distributed.cpu_offload else context.device
        self.description: dict[str, str] = {}
        self.model: nn.Module = model.to_empty(device=self.device)
        self.full_model: Any = self.model
        self.parameters = dict(model.named_parameters())
        self.full_shapes = self.parameters
        self.optimizer = build_optimizer(model, config.optimizer, self.dtype, self.newton_schulz)
        self.local_state = {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=precision == "fp16")

    # The step

    def micro_batches(self, batch: range) -> list[MicroBatch]:
        """This rank's micro-batches of a batch, a range of sample indices of all ranks together.

        All ranks get the same number of micro-batches, that of the largest share.
        """
        share = self.context.shard_range(batch.start, len(batch))
        largest = self.context.max_shard_size(len(batch))
        size = self.config.trainer.micro_batch_size or largest
        micro_batches = []
        for start in range(0, largest, size):
            indices = share[start : start + size]
            weight = len(indices) / len(batch)
            if not indices:
                indices = batch[:1]
            micro_batches.append(MicroBatch(indices, weight, batch, sync_gradients=start + size >= largest))
        return micro_batches

    def forward_backward(self, micro_batch: MicroBatch, data: CharDataset) -> list[Tensor]:
        """Adds the gradient of a micro-batch to `grad` of this rank's parameters.

        Returns:
            this rank's terms of the mean loss over the batch
        """
        [seed] = hash64(self.config.trainer.seed, micro_batch.indices.start).tolist()  # of dropout
        seed_device(self.context.device, seed)
        self.set_gradient_sync(micro_batch.sync_gradients)
        idx, targets = data[micro_batch.indices]
        loss = self.compute_loss(self.model, idx, targets) * micro_batch.weight
        self.scaler.scale(loss * self.gradient_divide_factor).backward()
        return [loss.detach()]

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        """Ranks exchange gradients in the backward pass of their last micro-batch, not in those before."""

    def reduce_gradients(self, batch: range, losses: list[Tensor]) -> list[Tensor]:
        """Exchanges gradients that no backward pass has exchanged, after this rank's last micro-batch.

        Args:
            batch: sample indices, of all ranks together
            losses: all that `forward_backward` has returned in this step

        Returns:
            the losses for `mean_loss`
        """
        return losses

    def compute_loss(self, model: Callable[..., Any], idx: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of inputs and targets, (B, T) each."""
        idx, targets = self.to_device(idx, targets)
        with self.autocast():
            _, loss = model(idx, targets)
        return loss

    def to_device(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies tensors of one shape and dtype to the device of this rank, on CUDA in one asynchronous copy.

        That needs pinned memory without gaps, and `pin_memory` would keep the strides of a window's two views.
        """
        device = self.context.device
        if device.type != "cuda":
            return tuple(tensor.to(device) for tensor in tensors)
        pinned = torch.empty(len(tensors), *tensors[0].shape, dtype=tensors[0].dtype, pin_memory=True)
        return torch.stack(tensors, out=pinned).to(device, non_blocking=True).unbind()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.context.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def mean_loss(self, losses: list[Tensor]) -> Tensor:
        """The mean loss over the batch, on all ranks, from what `reduce_gradients` has returned on each."""
        return self.context.all_reduce(torch.stack(losses).sum())

    def clip_grad_norm_(self, max_norm: float | None) -> Tensor:
        """Scales the gradient to a norm of at most `max_norm`; returns its norm before, the same on all ranks."""
        norm = self.total_norm(self.gradients)
        if max_norm is None:
            return norm
        # Where reading the norm waits for nothing, gradients that need no scaling are not multiplied by 1.
        if self.context.device.type != "cpu" or norm > max_norm:
            clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return norm

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of this rank's parameters, by GPT-2's names."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def total_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The norm of parameters, of gradients, or of anything else that is divided over the ranks like parameters.

        All ranks call it, and get the same: `total_norm(self.parameters)` is the norm of the full model's parameters.

        Args:
            tensors: those of this rank, by the names of their parameters
        """
        return get_total_norm(list(tensors.values()))

    # Evaluation

    @property
    def batches_per_round(self) -> int:
        """How many batches the ranks evaluate at once."""
        return self.context.world_size

    @torch.no_grad()
    def evaluate_round(self, batches: list[range], data: ValidationDataset) -> Tensor:
        """The mean loss of each batch that this rank computes, (len(batches),); zero for those of other ranks.

        Args:
            batches: at most `batches_per_round`; all ranks pass the same
        """
        losses = torch.zeros(len(batches), device=self.context.device)
        rank = self.context.rank
        idx, targets = data[batches[rank % len(batches)]]  # also on a spare rank, since sharded strategies gather
        self.full_model.eval()
        loss = self.compute_loss(self.full_model, idx, targets)
        self.full_model.train()
        if rank < len(batches):
            losses[rank] = loss
        return losses


class DDP(Strategy):
    """DistributedDataParallel: full replicas, whose gradients are averaged in buckets."""

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        super().__init__(model, context, config, precision)
        self.gradient_divide_factor = context.world_size  # DDP averages over ranks
        # They are undefined until weights are loaded, and the pass before `rebuild_buckets` computes with them.
        torch._foreach_zero_([parameter.detach() for parameter in self.parameters.values()])
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            process_group=context.unchecked_group(),
            bucket_cap_mb=config.distributed.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        self.model = self.ddp
        context.exit_callbacks.append(self._release)

    def rebuild_buckets(self, loss: Tensor) -> None:
        """Makes DDP rebuild its buckets, in new and resumed runs alike, with a loss that depends on all parameters.

        It does so after the first backward pass, and with three or more ranks the layout of the buckets determines the
        last bits of each sum. One pass whose gradients are dropped gives all steps the same layout.
        """
        loss.backward()
        self.model.zero_grad(set_to_none=True)

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        self.ddp.require_backward_grad_sync = sync_gradients  # what DDP's no_sync sets

    def _release(self) -> None:
        # The last owner of the process group destroys it. DDP's C++ part would do so while it holds the GIL, and wait
        # forever for gloo's thread, which needs the GIL to free a tensor (torch 2.13).
        del self.model
        del self.ddp
