"""The base class of strategies, which trains in one process, and DistributedDataParallel.

A strategy defines how parameters, gradients and optimizer state are distributed over ranks, and which of them ranks
send. docs/parallelism.md compares strategies. With every strategy, all ranks make the same number of forward passes,
because sharded strategies gather parameters in each pass.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stages 1 to 3); Zhao
et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from char_dataset import CharDataset, ValidationDataset
from mingpt.config.schema import Config
from mingpt.distributed.agreement import broadcast_object
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.optim.optimizer import build_optimizer
from mingpt.system.device import seed_device
from mingpt.text.permutation import hash64

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OptimizerState = Mapping[str, Mapping[str, Tensor]]  # parameter name -> key -> tensor


def layout(tensor: Tensor) -> tuple[list[int], str]:
    """Returns shape and dtype as plain data for other ranks."""
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def state_layouts(state: OptimizerState) -> dict[str, dict[str, tuple[list[int], str]]]:
    """Returns the layouts of each parameter's optimizer state, by key."""
    return {name: {key: layout(tensor) for key, tensor in tensors.items()} for name, tensors in state.items()}


def tied_names(model: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that has several, like a head that is tied to the embedding."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one forward pass on one rank.

    Attributes:
        indices: sample numbers; empty for a dummy, which fills up a smaller share
        batch: sample numbers of the whole batch, over all ranks
        sync_gradients: whether DDP and FSDP exchange gradients in this backward pass, the rank's last in the step
    """

    indices: range
    batch: range
    sync_gradients: bool = False

    def weight(self, data: CharDataset) -> float:
        """Returns the weight of the mean loss in the mean over the batch: the fraction of its targets."""
        return data.num_targets(self.indices) / max(1, data.num_targets(self.batch))


class Strategy:
    """Trains in one process, which holds everything. Other strategies are subclasses.

    Attributes:
        device: device of the parameters between steps
        parameters: parameters of this rank, by GPT-2's names
        buffers: the module and the name of each buffer of this rank
        full_shapes: tensors with the full shapes of the state of all ranks, by name
        local_state: optimizer state of each parameter that this rank updates, by the parameter's name
        is_sharded: whether each rank holds only a part of the state, so that all must call `iter_full_state`
        model: model for micro-batches
        full_model: model for evaluation and generation; all ranks must call it together
        replicas: ranks that evaluate different batches: all ranks or, with pipeline stages, those with the same stage
        optimizer: its step updates all parameters on all ranks
        scaler: gradient scaler, enabled in fp16
        description: rows for the summary at the start

    Args:
        model: model on the device on which it is trained
        precision: fp32, bf16 or fp16
    """

    is_sharded = False
    loss_factor = 1.0  # DDP and FSDP average gradients over ranks; multiplying the loss by this factor undoes that

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        self.context = context
        self.replicas = context
        self.config = config
        self.dtype = DTYPES[precision]
        self.device = torch.device("cpu") if config.distributed.cpu_offload else context.device
        self.description: dict[str, str] = {"strategy": config.distributed.strategy}
        self.model: nn.Module = model
        self.full_model: Any = self.model
        self.parameters = dict(model.named_parameters())
        self.buffers = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
        self.full_shapes: Mapping[str, Tensor] = self.state
        self.optimizer = self.build_optimizer(model)
        self.local_state = {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=precision == "fp16")

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, self.config.optimizer, self.dtype)

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of this rank, by name; tied parameters have several names.

        They are read again each time, because a model may replace its buffers.
        """
        return self.full_model.state_dict(keep_vars=True)

    # The step

    def broadcast_buffers(self) -> None:
        """Copies the buffers of the first replica, which snapshots contain, to the others.

        Each replica changes them by its own samples, as BatchNorm does with its averages.
        """
        for module, name in self.buffers:
            buffer = getattr(module, name)
            value = buffer.contiguous()
            self.context.broadcast_tensor(value, 0)
            buffer.copy_(value)

    @contextmanager
    def kept_buffers(self) -> Iterator[None]:
        """Leaves buffers as they were before the block."""
        buffers = [getattr(module, name) for module, name in self.buffers]
        values = [buffer.clone() for buffer in buffers]
        yield
        for (module, name), buffer, value in zip(self.buffers, buffers, values, strict=True):
            setattr(module, name, buffer.copy_(value))

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Prepares for a pass before the first step, which is not compiled and leaves buffers as they were."""
        is_compiled = self.config.trainer.compile
        eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()  # it imports for a second
        with self.kept_buffers(), eager, self.autocast():
            yield

    def zero_grad(self) -> None:
        """Deletes the gradients of the step before."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def micro_batches(self, batch: range) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a batch, which is a range of sample numbers over all ranks.

        All ranks get the same number of micro-batches, so a smaller share may end with a dummy.
        """
        share = self.context.shard_range(batch.start, len(batch))
        largest = self.context.max_shard_size(len(batch))
        size = self.config.trainer.micro_batch_size or largest
        micro_batches = []
        for start in range(0, largest, size):
            indices = share[start : start + size]
            micro_batches.append(MicroBatch(indices, batch, sync_gradients=start + size >= largest))
        return micro_batches

    def forward_backward(self, micro_batch: MicroBatch, data: CharDataset) -> Tensor:
        """Adds the gradient of a micro-batch to `grad` of this rank's parameters.

        Returns:
            this rank's part of the mean loss over the batch
        """
        self.set_gradient_sync(micro_batch.sync_gradients)
        idx, targets = self.to_device(*data[micro_batch.indices or micro_batch.batch[:1]])
        self.seed_dropout(micro_batch.indices.start)
        return self.backward(idx, targets, micro_batch.weight(data))

    def backward(self, idx: Tensor, targets: Tensor, weight: float | Tensor) -> Tensor:
        """Makes the passes of `forward_backward` on the device; what differs between micro-batches is an argument.

        Args:
            idx: tokens (B, T)
            targets: next tokens (B, T)
            weight: scalar, the weight of the mean loss in the mean over the batch
        """
        loss = self.compute_loss(self.model, idx, targets) * weight
        self.scale_loss(loss).backward()
        return loss.detach()

    def seed_dropout(self, *numbers: int) -> None:
        """Seeds dropout from the run's seed and these numbers."""
        [seed] = hash64(self.config.trainer.seed, *numbers).tolist()
        seed_device(self.context.device, seed)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns a part of the mean loss over the batch, scaled for backward."""
        return self.scaler.scale(loss * self.loss_factor)

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        """Sets whether later backward passes exchange gradients between ranks."""

    def reduce_gradients(self, batch: range, losses: list[Tensor]) -> list[Tensor]:
        """Exchanges gradients that backward passes have not exchanged, after this rank's last micro-batch.

        Args:
            batch: sample numbers of the whole batch, over all ranks
            losses: losses that `forward_backward` returned in this step

        Returns:
            losses for `mean_loss`
        """
        self.check_gradients()
        return losses

    def check_gradients(self) -> None:
        """Raises a UserError if a parameter lacks its gradient, because ranks add gradients in the same order."""
        if self.context.world_size == 1:
            return
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.grad is None:
                raise UserError(
                    f"model.py: {name} got no gradient on rank {self.context.rank}; with several ranks, each loss must "
                    "depend on all parameters, maybe by a factor of 0"
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

    def mean_loss(self, losses: list[Tensor]) -> Tensor:
        """Returns the mean loss over the batch on all ranks, from the losses that `reduce_gradients` returned."""
        return self.context.all_reduce(torch.stack(losses).sum())

    def update(self, lr: float | Tensor) -> Tensor:
        """Clips the gradients and updates the parameters. Returns the norm of the gradient before clipping."""
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
    def evaluate(self, batch: range, data: ValidationDataset) -> Tensor:
        """Returns the mean loss of a batch of windows. All ranks must call it together, each replica with its batch."""
        idx, targets = self.to_device(*data[batch])
        self.full_model.eval()
        loss = self.compute_loss(self.full_model, idx, targets)
        self.full_model.train()
        return loss

    # Snapshots

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Yields each name in the state dict, its full value and optimizer state. All ranks iterate together.

        Tensors are gathered one at a time, because a rank may not have memory for all of them.
        torch.distributed.checkpoint.state_dict does not do that, and it does not support ZeroRedundancyOptimizer. The
        next step may modify the tensors.
        """
        for name, tensor in self.state.items():
            yield name, tensor.detach(), dict(self.local_state.get(name, {}))

    def load_full_state(self, weights: Mapping[str, Tensor], state: OptimizerState, source: int) -> None:
        """Loads the full weights and optimizer state of rank `source`; other ranks' arguments are ignored."""
        layouts = broadcast_object(self.context, state_layouts(state), source)
        mine = self.state
        for name, like in self.full_shapes.items():
            weight = self.broadcast(weights, name, layout(like), source)
            if name in mine:
                mine[name].detach().copy_(self.shard_of(weight, mine[name]))
            for key, each in layouts.get(name, {}).items():
                tensor = self.broadcast(state.get(name, {}), key, each, source)
                if name in self.local_state:
                    self.local_state[name][key] = self.shard_of(tensor, mine[name])

    def broadcast(self, tensors: Mapping[str, Tensor], name: str, layout: tuple[list[int], str], source: int) -> Tensor:
        """Returns rank `source`'s tensor of this name on the device of this rank; it ignores other ranks' tensors."""
        shape, dtype = layout
        full = torch.empty(shape, dtype=getattr(torch, dtype), device=self.context.device)
        if self.context.rank == source:
            full.copy_(tensors[name])
        self.context.broadcast_tensor(full, source)
        return full

    def shard_of(self, full: Tensor, like: Tensor) -> Tensor:
        """Returns this rank's part of a full tensor that is sharded like a parameter of this rank."""
        return full


class DDP(Strategy):
    """DistributedDataParallel: each rank has the full model, and gradients are averaged in buckets.

    Args:
        example: arguments of the model, for a pass before the first step
    """

    def __init__(
        self,
        model: nn.Module,
        context: DistributedContext,
        config: Config,
        precision: str,
        example: tuple[Tensor, ...],
    ) -> None:
        super().__init__(model, context, config, precision)
        self.loss_factor = context.world_size  # DDP averages over ranks
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            process_group=context.group,
            bucket_cap_mb=config.distributed.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        self.ddp.broadcast_buffers = False  # as its argument, it is deprecated
        self.model = self.ddp
        self._rebuild_buckets(example)
        context.exit_callbacks.append(self._release)

    def _rebuild_buckets(self, example: tuple[Tensor, ...]) -> None:
        """Makes DDP rebuild its buckets before the first step, by a backward pass whose gradients are discarded.

        DDP would rebuild them after the first step of each start. With three or more ranks, the layout of the buckets
        determines the last bits of each sum, so a resumed run would differ from an uninterrupted one.
        """
        with self.first_pass():
            output = self.ddp(*example)
            if isinstance(output, tuple):  # the whole model returns logits and a loss
                _, output = output
            output.sum().backward()
        self.check_gradients()
        self.ddp.zero_grad(set_to_none=True)

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        self.ddp.require_backward_grad_sync = sync_gradients  # like DDP.no_sync

    def _release(self) -> None:
        # The last owner of the process group destroys it. DDP's C++ part would do that while it holds the GIL, and
        # would wait forever for gloo's thread, which needs the GIL to free a tensor (torch 2.13).
        del self.model
        del self.ddp
