"""The base class of strategies, which trains in one process.

A strategy defines how parameters, gradients and optimizer state are distributed over ranks, and which of them ranks
send. docs/parallelism.md compares strategies. With every strategy, all ranks make the same number of forward passes,
because sharded strategies gather parameters in each pass.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stages 1 to 3); Zhao
et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from char_dataset import CharDataset, ValidationDataset
from mingpt.config.schema import Config
from mingpt.distributed.context import DistributedContext, PendingNumbers
from mingpt.errors import UserError
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.optim.optimizer import build_optimizer
from mingpt.parallel.state import RankState
from mingpt.system.device import seed_generators
from mingpt.text.permutation import hash64

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

READING = -1  # the last number of the seed with which samples are read
UPDATING = -2  # the same for the update of the weights


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one forward pass on one rank, on the CPU.

    Attributes:
        first: number of the first sample, which seeds dropout
        idx: tokens (B, T)
        targets: next tokens (B, T)
        num_targets: number of targets other than IGNORE_INDEX; targets of samples beyond the batch do not count
    """

    first: int
    idx: Tensor
    targets: Tensor
    num_targets: int

    def weight(self, target_counts: PendingNumbers) -> float:
        """Returns the fraction of the batch's targets, over all ranks, that this micro-batch has."""
        return self.num_targets / max(1, sum(target_counts.wait()))


class Strategy(RankState):
    """Trains in one process, which holds everything. Other strategies are subclasses.

    Attributes:
        device: device of the parameters between steps
        model: model for micro-batches
        full_model: model for evaluation and generation; all ranks must call it together
        replicas: ranks that evaluate different batches: all ranks or, with pipeline stages, those with the same stage
        scaler: gradient scaler, enabled in fp16
        description: rows for the summary at the start

    Args:
        model: model on the device on which it is trained
        precision: fp32, bf16 or fp16
    """

    loss_factor = 1.0  # DDP and FSDP average gradients over ranks; multiplying the loss by this factor undoes that

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        self.context = context
        self.replicas = context
        self.config = config
        self.dtype = DTYPES[precision]
        self.device = torch.device("cpu") if config.distributed.cpu_offload else context.device
        self.description: dict[str, str] = {"strategy": config.distributed.strategy}
        self.model: nn.Module = model
        self.full_model = model
        self.parameters = dict(model.named_parameters())
        self.full_shapes = self.state  # this rank has all of it
        self.optimizer = self.build_optimizer(model)
        self.built_groups = [dict(group) for group in self.optimizer.param_groups]
        # The optimizer fills these dictionaries in its first step. Reading `state` creates them.
        self.local_state = {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=precision == "fp16")

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, self.config.optimizer, self.dtype)

    # The step

    def seed(self, *numbers: int) -> None:
        """Seeds the generators of Python, NumPy, the CPU and the device from the run's seed and these numbers."""
        [seed] = hash64(self.config.trainer.seed, *numbers).tolist()
        seed_generators(self.context.device, seed)

    def shares(self, batch: range) -> list[range]:
        """Returns the sample numbers of each of this rank's micro-batches.

        All ranks have the same number of micro-batches, so a smaller share may end with a dummy, beyond the batch.

        Args:
            batch: sample numbers of the whole batch, over all ranks
        """
        share = self.context.shard(batch)
        largest_share = math.ceil(len(batch) / self.context.world_size)
        size = self.config.trainer.micro_batch_size or largest_share
        dummy = range(batch.stop, batch.stop + 1)
        return [share[start : start + size] or dummy for start in range(0, largest_share, size)]

    def read(self, batch: range, data: CharDataset) -> list[MicroBatch]:
        """Reads this rank's micro-batches of a batch. Reading may use random numbers."""
        micro_batches = []
        for numbers in self.shares(batch):
            self.seed(numbers.start, READING)
            idx, targets = data[numbers]
            num_real = max(0, batch.stop - numbers.start)
            if num_real < len(numbers):
                targets = targets.clone()
                targets[num_real:] = IGNORE_INDEX  # of samples beyond the batch
            num_targets = int(np.count_nonzero(targets.numpy() != IGNORE_INDEX))
            micro_batches.append(MicroBatch(numbers.start, idx, targets, num_targets))
        return micro_batches

    def count_targets(self, micro_batches: list[MicroBatch]) -> int:
        """Returns this rank's part of the number of targets of the whole batch."""
        return sum(micro_batch.num_targets for micro_batch in micro_batches)

    def broadcast_buffers(self) -> None:
        """Copies the buffers of the first replica, which snapshots contain, to the others.

        Each replica changes them by its own samples, as BatchNorm does with its averages.
        """
        for buffer in self.model.buffers():
            self.replicas.broadcast_tensor(buffer, 0)

    def zero_grad(self) -> None:
        """Deletes the gradients of the step before."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def forward_backward(self, micro_batches: list[MicroBatch], target_counts: PendingNumbers) -> list[Tensor]:
        """Computes the gradient of the mean loss over the whole batch, and exchanges it with the other ranks.

        Args:
            target_counts: each rank's part of the number of targets of the whole batch

        Returns:
            this rank's terms of the mean loss over the batch
        """
        losses = []
        for micro_batch in micro_batches:
            self.set_gradient_sync(micro_batch is micro_batches[-1])
            losses.append(self.accumulate(micro_batch, target_counts))
        return losses

    def accumulate(self, micro_batch: MicroBatch, target_counts: PendingNumbers) -> Tensor:
        """Adds the gradient of a micro-batch to `grad` of this rank's parameters. Returns its term of the mean loss."""
        idx, targets = self.to_device(micro_batch.idx, micro_batch.targets)
        self.seed(micro_batch.first)
        mean = self.compute_loss(self.model, idx, targets)  # while ranks exchange their numbers of targets
        loss = mean * micro_batch.weight(target_counts)
        self.scale_loss(loss).backward()
        return loss.detach()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns a part of the mean loss over the batch, scaled for backward."""
        return self.scaler.scale(loss * self.loss_factor)

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        """Sets whether the next backward pass, the last one of a step, exchanges gradients between ranks."""

    def check_gradients(self) -> None:
        """Raises a UserError if a parameter lacks its gradient, because ranks add gradients in the same order."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.grad is None:
                raise UserError(
                    f"model.py: {name} got no gradient on rank {self.context.rank}; each loss must depend on all "
                    "parameters, maybe by a factor of 0, except for those with requires_grad False"
                )

    def compute_loss(self, model: Callable[..., Any], idx: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of inputs and targets on this rank's device, (B, T) each."""
        with self.autocast():
            _, loss = model(idx, targets)
        return loss

    def to_device(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies tensors with the same shape and dtype to this rank's device, on CUDA in one asynchronous copy.

        Such a copy needs contiguous pinned memory, but `pin_memory` would keep the strides of a window's two views.
        """
        device = self.context.device
        if device.type != "cuda":
            return tuple(tensor.to(device) for tensor in tensors)
        pinned = torch.empty(len(tensors), *tensors[0].shape, dtype=tensors[0].dtype, pin_memory=True)
        return torch.stack(tensors, out=pinned).to(device, non_blocking=True).unbind()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.context.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def eager(self) -> AbstractContextManager:
        """Runs a compiled model without compiled code within the block. The first call takes a second."""
        return torch.compiler.set_stance("force_eager") if self.config.trainer.compile else nullcontext()

    def mean_loss(self, losses: list[Tensor]) -> Tensor:
        """Returns the mean loss over the batch on all ranks, from the losses that `forward_backward` returned."""
        return self.context.all_reduce(torch.stack(losses).sum())

    def update(self, lr: float | Tensor) -> Tensor:
        """Clips the gradients and updates the parameters. Returns the norm of the gradient before clipping."""
        self.check_gradients()
        self.scaler.unscale_(self.optimizer)  # without fp16, the scaler only calls the optimizer
        norm = self.clip_grad_norm_(self.config.optimizer.grad_norm_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def clip_grad_norm_(self, max_norm: float | None) -> Tensor:
        """Scales gradients to a total norm of at most `max_norm`. Returns the norm before scaling, on all ranks."""
        norm = self.total_norm(self.gradients)
        if max_norm is not None:
            clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return norm

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's parameters, by GPT-2's names."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def total_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the total norm over all ranks of tensors that are sharded like parameters. All must call it.

        For example, `total_norm(self.parameters)` is the norm of the full model's parameters, on every rank.

        Args:
            tensors: tensors of this rank, by the names of their parameters
        """
        return get_total_norm(list(tensors.values()))

    # Evaluation

    @torch.no_grad()
    def evaluate(self, batch: range, data: ValidationDataset) -> tuple[Tensor, Tensor]:
        """Returns the mean loss of a batch of windows, and the number of its targets.

        All ranks must call it together, each replica with its batch.
        """
        self.seed(batch.start, READING)
        idx, targets = self.to_device(*data[batch])
        self.full_model.eval()
        loss = self.compute_loss(self.full_model, idx, targets)
        self.full_model.train()
        return loss, (targets != IGNORE_INDEX).sum()
