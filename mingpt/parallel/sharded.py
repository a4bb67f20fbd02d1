"""Sharded strategies: ZeRO-1, and FSDP2 for ZeRO-2 and ZeRO-3."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import get_total_norm

from mingpt.config.schema import Config
from mingpt.distributed.agreement import reduce_object
from mingpt.distributed.context import DistributedContext
from mingpt.optim.muon import newton_schulz, to_local
from mingpt.optim.optimizer import build_optimizer
from mingpt.parallel.full_state import state_keys
from mingpt.parallel.strategy import DDP, DTYPES, Strategy


def newton_schulz_sharded(rows: Tensor, ns_dtype: torch.dtype, like: DTensor) -> Tensor:
    """`newton_schulz` for k matrices (m, n) sharded by rows: each rank receives some of them in full."""
    shape = torch.Size((len(rows), *like.shape))
    stride = (like.numel(), like.size(1), 1)
    sharded = partial(DTensor.from_local, device_mesh=like.device_mesh, shape=shape, stride=stride)
    full = sharded(rows, placements=[Shard(1)]).redistribute(placements=[Shard(0)]).to_local()
    updates = sharded(newton_schulz(full, ns_dtype, like), placements=[Shard(0)])
    return updates.redistribute(placements=[Shard(1)]).to_local()


class _ZeroRedundancyOptimizer(ZeroRedundancyOptimizer):
    """One whose local optimizer skips updates by `found_inf`, so that GradScaler does not wait for the device."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None  # GradScaler sets both for the time of a step
    found_inf: Tensor

    def step(self, closure: None = None, **kwargs: Any) -> None:  # type: ignore[override]
        if hasattr(self, "found_inf"):
            self.optim.grad_scale = self.grad_scale
            self.optim.found_inf = self.found_inf
        super().step(closure, **kwargs)


class ZeRO1(DDP):
    """DDP with sharded optimizer state: each rank updates whole parameters of its own and broadcasts them."""

    is_sharded = True

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        super().__init__(model, context, config, precision)
        # Each rank broadcasts its updated parameters as one tensor.
        wrapper = partial(_ZeroRedundancyOptimizer, parameters_as_bucket_view=True, process_group=context.group)
        self.optimizer = build_optimizer(model, config.optimizer, self.dtype, wrapper=wrapper)
        local: torch.optim.Optimizer = self.optimizer.optim  # type: ignore[attr-defined]
        owned = {parameter for group in local.param_groups for parameter in group["params"]}
        self.local_state = {name: local.state[p] for name, p in self.parameters.items() if p in owned}

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        owners = reduce_object(
            self.context,
            state_keys(self.local_state),
            lambda parts: {name: (rank, keys) for rank, part in enumerate(parts) for name, keys in part.items()},
        )
        for name, parameter in self.parameters.items():
            owner, keys = owners[name]
            state = self.broadcast_tensors(owner, name, keys, self.local_state.get(name, {}))
            yield name, parameter.detach(), dict(state)


class FSDP(Strategy):
    """FSDP2 (ZeRO-3): each rank holds its rows of every parameter, and a block is unsharded while it is needed.

    In bf16 and fp16, blocks are gathered in that precision, embeddings in fp32, and gradients are reduced in fp32. With
    cpu_offload, shards are in host memory.
    """

    is_sharded = True
    needs_process_group = True
    compiles_blocks = True  # parameters of a block are gathered before it
    reshard_after_forward = True
    newton_schulz = staticmethod(newton_schulz_sharded)  # type: ignore[assignment]

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        group = context.group or dist.group.WORLD
        options: dict[str, Any] = {"mesh": DeviceMesh.from_group(group, context.device.type)}  # type: ignore[arg-type]
        if config.distributed.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32, cast_forward_inputs=False)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy, reshard_after_forward=self.reshard_after_forward, **options)
        # The rest, embeddings, is needed last in forward and first in backward.
        self.sharded_model = fully_shard(model, reshard_after_forward=False, **options)
        super().__init__(model, context, config, precision)
        self.gradient_divide_factor = context.world_size  # FSDP averages over ranks

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        self.sharded_model.set_requires_gradient_sync(sync_gradients)
        self.sharded_model.set_reshard_after_backward(sync_gradients or self.reshard_after_forward)

    def total_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        norm = get_total_norm([*map(to_local, tensors.values())]).to(self.context.device)
        return self.context.all_reduce(norm**2).sqrt().to(self.device)

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        for name, weight, state in super().iter_full_state():
            yield name, _full_tensor(weight), {key: _full_tensor(tensor) for key, tensor in state.items()}

    def shard_of(self, full: Tensor, parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor) and full.dim():  # AdamW's counter of steps has none
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return full.to(self.device)


class ZeRO2(FSDP):
    """FSDP whose blocks stay unsharded from forward to backward, so that parameters are gathered once per step."""

    reshard_after_forward = False


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
