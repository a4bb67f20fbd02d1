"""What do ranks deal out, and how does it become whole? ZeRO-1, and FSDP2 for ZeRO-2 and ZeRO-3.

A room of its own because what it imports takes most of a second, which runs that deal out nothing need not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import get_total_norm

from mingpt.distributed.process_group import DistributedContext, to_local
from mingpt.optimizer import build_optimizer, newton_schulz
from mingpt.parallel.data_parallel import DDP, DTYPES, Strategy
from model import Stage

if TYPE_CHECKING:
    from mingpt.config import Config


def newton_schulz_sharded(rows: Tensor, dtype: torch.dtype, like: DTensor) -> Tensor:
    """`newton_schulz`, for matrices of which each rank holds some rows: each rank is sent some of them whole.

    Args:
        rows: (k, this rank's rows, n)
        dtype: of the products
        like: one of the k, (m, n), over ranks
    """
    sizes, strides = torch.Size((len(rows), *like.shape)), (like.numel(), like.size(1), 1)
    dealt_out = partial(DTensor.from_local, device_mesh=like.device_mesh, shape=sizes, stride=strides)
    whole = dealt_out(rows, placements=[Shard(1)]).redistribute(placements=[Shard(0)]).to_local()
    moved = dealt_out(newton_schulz(whole, dtype, like), placements=[Shard(0)])
    return moved.redistribute(placements=[Shard(1)]).to_local()


class ZeRO1(DDP):
    """DDP, with whole parameters' optimizer state dealt out: each rank moves its own and sends them to the others."""

    parts = True

    def __init__(self, model: Stage, context: DistributedContext, config: Config, precision: str, *how: Any) -> None:
        super().__init__(model, context, config, precision, *how)
        # Each rank sends the parameters that it has moved in one piece, not one by one.
        deal_out = partial(ZeroRedundancyOptimizer, parameters_as_bucket_view=True, process_group=context.group)
        self.optimizer = build_optimizer(model, config.optimizer, self.dtype, dealt_out=deal_out)
        self.stepper = self.optimizer.optim  # type: ignore[attr-defined]
        self.mine = {parameter for group in self.stepper.param_groups for parameter in group["params"]}

    def state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each parameter's owner sends its state."""
        layouts = self.context.all_gather_object(
            {
                name: {key: tensor.to("meta") for key, tensor in self.stepper.state[parameter].items()}
                for name, parameter in self.parameters.items()
                if self._moves(parameter)
            }
        )
        owners = {name: rank for rank, layout in enumerate(layouts) for name in layout}
        for name, parameter in self.parameters.items():
            owner, held = owners[name], self.stepper.state[parameter] if self._moves(parameter) else {}
            layout = layouts[owner][name]
            yield (
                name,
                parameter.detach(),
                {key: self._receive(held.get(key), like, owner) for key, like in layout.items()},
            )

    def _moves(self, parameter: Tensor) -> bool:
        return parameter in self.mine


class FSDP(Strategy):
    """FSDP2: each rank holds its rows of every tensor, and a block is whole while it is needed.

    In bf16 and fp16 blocks travel and are held whole in that precision, embeddings in fp32; gradients are added in
    fp32. Matrix products are autocast's, as with whole parameters.

    With strategy zero2 blocks stay whole from forward to backward, so that parameters are sent once in a step, not
    twice; with cpu_offload, this rank's part is in the host's memory.
    """

    parts = True
    newton_schulz = staticmethod(newton_schulz_sharded)  # type: ignore[assignment]

    def __init__(self, model: Stage, context: DistributedContext, config: Config, precision: str) -> None:
        self.keep_whole, offload = config.distributed.strategy == "zero2", config.distributed.cpu_offload
        group: Any = context.group or dist.group.WORLD
        how: dict[str, Any] = {"mesh": DeviceMesh.from_group(group, context.device.type)}
        if offload:
            how["offload_policy"] = CPUOffloadPolicy()
        policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=not self.keep_whole, **how)
        # What is left, embeddings, is needed last in forward and first in backward.
        self.sharded = fully_shard(model, reshard_after_forward=False, **how)
        super().__init__(model, context, config, precision, torch.device("cpu") if offload else None)
        self.factor = context.world_size  # FSDP averages over ranks

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients leave this rank in the last one only."""
        self.sharded.set_requires_gradient_sync(last)
        self.sharded.set_reshard_after_backward(last or not self.keep_whole)
        yield

    def norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Each rank's part of it counts."""
        gradients = [to_local(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]
        mine = get_total_norm(gradients).to(self.context.device)
        return self.context.all_reduce(mine**2).sqrt().to(self.device)

    def state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Gathered one tensor at a time."""
        for name, weight, state in super().state():
            yield name, _gathered(weight), {key: _gathered(tensor) for key, tensor in state.items()}

    def _part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        if whole.dim() and isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return whole.to(self.device)


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
