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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mingpt.config import Config
from mingpt.distributed.process_group import DistributedContext
from mingpt.muon import newton_schulz
from mingpt.optimizer import build_optimizer
from mingpt.parallel.memory import MemoryUsage, optimizer_bytes
from mingpt.utils.device import seed_device
from mingpt.utils.errors import UserError
from mingpt.utils.hashing import hash64

OptimizerState = Mapping[str, Mapping[str, Tensor]]  # parameter name -> name of the tensor -> tensor
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class WindowDataset(Protocol):
    """Serves windows of the text by number: inputs and targets, (B, T) each."""

    block_size: int

    def __getitem__(self, numbers: range) -> tuple[Tensor, Tensor]: ...


class Strategy:
    """One process that holds everything, and what all strategies have in common.

    Attributes:
        model: called with micro-batches
        full_model: called by all ranks together, for evaluation and generation
        parameters: those of this rank, by GPT-2's names
        full_shapes: by the same names, tensors of the full shapes
        optimizer: its step updates all parameters on all ranks
        local_optimizer: the optimizer that updates those of this rank, and has their state
        scaler: gradient scaler, enabled in fp16
        description: rows for the summary at the start

    Args:
        model: on the meta device; its weights are undefined until `load_full_state`
        precision: fp32, bf16 or fp16
        device: where parameters are between steps, by default the device of the rank
    """

    loss_factor = 1.0  # multiplies losses before backward
    is_sharded = False  # a rank holds only a shard of something, so `iter_full_state` needs all ranks
    needs_process_group = False  # also for one rank
    shards_optimizer = False  # each rank has the optimizer state of some whole parameters
    needs_one_thread = False  # bits depend on the number of CPU threads
    newton_schulz = staticmethod(newton_schulz)
    estimated_memory: MemoryUsage  # of the rank that needs most

    def __init__(
        self,
        model: nn.Module,
        context: DistributedContext,
        config: Config,
        precision: str,
        device: torch.device | None = None,
    ) -> None:
        self.context, self.config, self.dtype = context, config, DTYPES[precision]
        self.device = device or context.device
        self.description: dict[str, str] = {}
        self.model: nn.Module = model.to_empty(device=self.device)
        self.full_model: Any = self.model
        self.parameters = self.full_shapes = dict(model.named_parameters())
        self.optimizer = self.local_optimizer = build_optimizer(model, config.optimizer, self.dtype, self.newton_schulz)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=precision == "fp16")

    # What a configuration needs

    @classmethod
    def for_world_size(cls, world_size: int) -> type["Strategy"]:
        """The class to use with this number of ranks."""
        return cls

    @classmethod
    def validate(cls, config: Config, world_size: int) -> None:
        """Raises a UserError if a rank would get no sequence."""
        if (batch_size := config.trainer.batch_size) < world_size:
            raise UserError(
                f"trainer.batch_size is {batch_size}, fewer than the {world_size} ranks, and each needs a sequence: "
                f"raise it, or start at most {batch_size} processes"
            )

    @classmethod
    def validate_device(cls, config: Config, device: torch.device, precision: str) -> None:
        """Raises a UserError if the device or the precision chosen for it does not suit the strategy."""

    @classmethod
    def estimate_memory(cls, config: Config, model: Any, ranks: int, precision: str, activations: float) -> MemoryUsage:
        """Bytes on the rank that needs most.

        Args:
            model: on the meta device, with `blocks`; one pipeline stage if there are several
            ranks: the number of replicas
            activations: bytes
        """
        parameters = 4 * sum(p.numel() for p in model.parameters())
        copies = 0 if precision == "fp32" else 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
        state = optimizer_bytes(model, config.optimizer, ranks if cls.shards_optimizer else 1)
        return MemoryUsage(parameters, parameters, state, copies, activations)

    @classmethod
    def memory_note(cls, parameters: float, optimizer: float, ranks: int) -> str:
        """A remark on the estimate, from bytes of all parameters and of the full optimizer state."""
        return ""

    # The step

    def warm_up(self, forward: Callable[[], Tensor]) -> None:
        """Prepares for the first step with a forward pass of `model` to a scalar that depends on all parameters."""

    def forward_backward(self, batch: range, data: WindowDataset) -> list[Tensor]:
        """Computes the gradient of the mean loss over the batch, in `grad` of the parameters of this rank.

        Args:
            batch: sample numbers, of all ranks together

        Returns:
            this rank's terms of the mean loss, for `mean_loss`
        """
        losses, micro_batches = [], self.micro_batches(batch)
        for i, (numbers, weight) in enumerate(micro_batches, start=1):
            seed_device(self.context.device, self.dropout_seed(numbers.start))
            with self.gradient_sync(is_last=i == len(micro_batches)):
                loss = self.compute_loss(self.model, *data[numbers]) * weight
                self.scaler.scale(loss * self.loss_factor).backward()
            losses.append(loss.detach())
        return self.finish_gradients(losses)

    def micro_batches(self, batch: range) -> list[tuple[range, float]]:
        """This rank's sample numbers per micro-batch, each with its weight in the mean over the batch.

        All ranks get the same number of micro-batches, that of the largest share; missing ones have weight zero.
        """
        share, largest = self.context.shard_range(batch.start, len(batch)), self.context.max_shard_size(len(batch))
        size = self.config.trainer.micro_batch_size or largest
        ranges = (share[start : start + size] for start in range(0, largest, size))
        return [(numbers or batch[:1], len(numbers) / len(batch)) for numbers in ranges]

    def dropout_seed(self, first: int) -> int:
        """The seed of dropout in the micro-batch that begins with sample `first`."""
        return int(hash64(self.config.trainer.seed, first)[0])

    @contextmanager
    def gradient_sync(self, is_last: bool) -> Iterator[None]:
        """Wraps forward and backward of a micro-batch; ranks exchange gradients in the last one of the step."""
        yield

    def finish_gradients(self, losses: list[Tensor]) -> list[Tensor]:
        """Runs after the last micro-batch, with its losses on this rank; returns what `forward_backward` returns."""
        return losses

    def compute_loss(self, model: Callable[..., Any], idx: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of inputs and targets, (B, T) each."""
        idx, targets = self.to_device(idx, targets)
        with self.autocast():
            return model(idx, targets)[1]

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
        """The mean loss over the batch, on all ranks, from what `forward_backward` returned on each."""
        return self.context.all_reduce(torch.stack(losses).sum())

    def clip_grad_norm_(self, max_norm: float | None) -> Tensor:
        """Scales the gradient to a norm of at most `max_norm`; returns its norm before, the same on all ranks."""
        norm = self.grad_norm(self.parameters)
        if max_norm is not None:
            clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return norm

    def grad_norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The norm of these parameters' full gradient."""
        return get_total_norm([parameter.grad for parameter in parameters.values() if parameter.grad is not None])

    # Evaluation

    @property
    def batches_per_round(self) -> int:
        """How many batches the ranks evaluate at once."""
        return self.context.world_size

    @torch.no_grad()
    def evaluate_round(self, batches: list[range], data: WindowDataset) -> Tensor:
        """The mean loss of each batch that this rank computes, (len(batches),); zero for those of other ranks.

        Args:
            batches: at most `batches_per_round`; all ranks pass the same
        """
        losses = torch.zeros(len(batches), device=self.context.device)
        is_spare = self.context.rank >= len(batches)  # it computes a batch too, since sharded strategies gather
        mine = 0 if is_spare else self.context.rank
        self.full_model.eval()
        loss = self.compute_loss(self.full_model, *data[batches[mine]])
        self.full_model.train()
        if not is_spare:
            losses[mine] = loss
        return losses

    # The full state

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each parameter's name, full value and full optimizer state. All ranks iterate together.

        The next step may modify the tensors.
        """
        for name, parameter in self.parameters.items():
            yield name, parameter.detach(), dict(self.local_optimizer.state[parameter])

    @torch.no_grad()
    def load_full_state(self, weights: Mapping[str, Tensor], state: OptimizerState, source: int) -> None:
        """Loads the full weights and optimizer state that rank `source` passes; those of other ranks are ignored.

        One tensor at a time is broadcast and sharded, since no rank may have memory for more. That is why
        torch.distributed.checkpoint.state_dict does not serve here; nor does it know ZeroRedundancyOptimizer.
        """
        for name, key, full in self._broadcast_full_state(weights, state, source):
            self.load_tensor(name, key, full)

    @torch.no_grad()
    def copy_full_state(self, source: int, keep: bool) -> None:
        """Copies the full state of rank `source` to the ranks that pass `keep`, completely or not at all."""
        weights, state = {}, {}
        if self.context.rank == source:
            for name, weight, tensors in self.iter_full_state():
                weights[name], state[name] = weight, tensors
        received = [item for item in self._broadcast_full_state(weights, state, source) if keep]
        for name, key, full in received:
            self.load_tensor(name, key, full)

    def _broadcast_full_state(
        self, weights: Mapping[str, Tensor], state: OptimizerState, source: int
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Yields name, key and value of each tensor that rank `source` passes; weights have an empty key."""
        meta = {name: {key: tensor.to("meta") for key, tensor in tensors.items()} for name, tensors in state.items()}
        meta = self.context.broadcast_object(meta, source)
        for name, like in self.full_shapes.items():
            yield name, "", self._broadcast_from(source, weights.get(name), like)
            for key, like_state in meta.get(name, {}).items():
                yield name, key, self._broadcast_from(source, state.get(name, {}).get(key), like_state)

    def load_tensor(self, name: str, key: str, full: Tensor) -> None:
        """Keeps this rank's shard of a parameter, or, with a key, of that tensor of its optimizer state."""
        parameter = self.parameters[name]
        if not key:
            parameter.copy_(self._shard(full, parameter))
        elif self.owns(parameter):
            self.local_optimizer.state[parameter][key] = self._shard(full, parameter)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates the parameter."""
        return True

    def _broadcast_from(self, source: int, tensor: Tensor | None, like: Tensor) -> Tensor:
        full = torch.empty(like.shape, dtype=like.dtype, device=self.context.device)
        if tensor is not None and self.context.rank == source:
            full.copy_(tensor)
        self.context.broadcast_tensor(full, source)
        return full

    def _shard(self, full: Tensor, parameter: Tensor) -> Tensor:
        return full


class DDP(Strategy):
    """DistributedDataParallel: full replicas, whose gradients are averaged in buckets."""

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        super().__init__(model, context, config, precision)
        self.loss_factor = context.world_size  # DDP averages over ranks
        torch._foreach_zero_([parameter.detach() for parameter in self.parameters.values()])
        self.model = self.ddp = DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            process_group=context.group,
            bucket_cap_mb=config.distributed.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        context.exit_callbacks.append(self._release)

    @classmethod
    def for_world_size(cls, world_size: int) -> type[Strategy]:
        return Strategy if world_size == 1 else cls

    def warm_up(self, forward: Callable[[], Tensor]) -> None:
        """Makes DDP rebuild its buckets, in new and resumed runs alike.

        It does so after the first backward pass, and with three or more ranks the layout of the buckets determines the
        last bits of each sum. One pass whose gradients are dropped gives all steps the same layout.
        """
        forward().backward()
        self.model.zero_grad(set_to_none=True)

    def _release(self) -> None:
        # The last owner of the process group destroys it. DDP's C++ part would do so while it holds the GIL, and wait
        # forever for gloo's thread, which needs the GIL to free a tensor (torch 2.13).
        del self.model, self.ddp

    @contextmanager
    def gradient_sync(self, is_last: bool) -> Iterator[None]:
        self.ddp.require_backward_grad_sync = is_last  # what DDP's no_sync sets
        yield
