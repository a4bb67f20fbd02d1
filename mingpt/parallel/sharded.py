"""Sharded strategies: ZeRO-1 with DDP, ZeRO-2 and ZeRO-3 with FSDP2."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from mingpt.config.schema import Config
from mingpt.distributed.agreement import all_gather_object
from mingpt.distributed.context import DistributedContext
from mingpt.optim.muon import to_local
from mingpt.optim.optimizer import build_optimizer
from mingpt.parallel.ddp import DDP
from mingpt.parallel.state import FullState, state_layouts
from mingpt.parallel.strategy import DTYPES, Strategy

# With gloo, each FSDP run of Muon would warn that gradients are gathered instead of exchanged (all-to-all).
logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)


class ZeRO1(DDP):
    """DDP with sharded optimizer state: each rank updates some of the parameters and broadcasts them.

    In fp16, GradScaler waits for the GPU in each step, since ZeroRedundancyOptimizer does not read `found_inf`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        local: torch.optim.Optimizer = self.optimizer.optim  # type: ignore[attr-defined]
        owned = {parameter for group in local.param_groups for parameter in group["params"]}
        self.local_state = {name: local.state[p] for name, p in self.parameters.items() if p in owned}

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # With the bucket view, each rank broadcasts its updated parameters as one tensor.
        wrapper = partial(ZeroRedundancyOptimizer, parameters_as_bucket_view=True, process_group=self.context.group)
        return build_optimizer(model, self.config.optimizer, self.dtype, wrapper)

    def iter_full_state(self) -> FullState:
        parts = all_gather_object(self.context, state_layouts(self.local_state))
        owners = {name: (rank, layouts) for rank, part in enumerate(parts) for name, layouts in part.items()}
        for name, tensor in self.state.items():
            owner, layouts = owners.get(name, (0, {}))  # a frozen parameter and a buffer have no owner
            mine = self.local_state.get(name, {})
            state = {key: self.broadcast(mine, key, layout, owner) for key, layout in layouts.items()}
            yield name, tensor.detach(), state


class FSDP(Strategy):
    """FSDP2 (ZeRO-3): each rank holds some rows of every parameter, and blocks are unsharded while they are needed.

    In bf16 and fp16, blocks are gathered in that precision, embeddings in fp32, and gradients are reduced in fp32. With
    cpu_offload, shards are in host memory.
    """

    reshard_after_forward = True

    def __init__(self, model: nn.Module, context: DistributedContext, config: Config, precision: str) -> None:
        group = context.group or dist.group.WORLD
        options: dict[str, Any] = {"mesh": DeviceMesh.from_group(group, context.device.type)}  # type: ignore[arg-type]
        if config.distributed.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32, cast_forward_inputs=False)
        attributes = {name: vars(parameter) for name, parameter in model.named_parameters()}  # such as no_weight_decay
        for block in dict.fromkeys(model.blocks.values()):  # type: ignore[operator]
            fully_shard(block, mp_policy=policy, reshard_after_forward=self.reshard_after_forward, **options)
        # The embeddings, which are the rest of the model, are used last in forward and first in backward.
        self.sharded_model = fully_shard(model, reshard_after_forward=False, **options)
        for name, parameter in model.named_parameters():
            vars(parameter).update(attributes[name])
        super().__init__(model, context, config, precision)
        self.loss_factor = context.world_size  # FSDP averages over ranks

    def set_gradient_sync(self, sync_gradients: bool) -> None:
        self.sharded_model.set_requires_gradient_sync(sync_gradients)
        self.sharded_model.set_reshard_after_backward(sync_gradients or self.reshard_after_forward)

    def total_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        norm = get_total_norm([to_local(tensor) for tensor in tensors.values()]).to(self.context.device)
        return self.context.all_reduce(norm**2).sqrt().to(self.device)

    def iter_full_state(self) -> FullState:
        for name, weight, state in super().iter_full_state():
            yield name, _full_tensor(weight), {key: _full_tensor(tensor) for key, tensor in state.items()}

    def shard_of(self, full: Tensor, like: Tensor) -> Tensor:
        if isinstance(like, DTensor) and full.dim():  # AdamW's step counter is a scalar and not sharded
            full = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
        return full.to(self.device)


class ZeRO2(FSDP):
    """FSDP that keeps blocks unsharded from forward to backward, so that parameters are gathered once per step."""

    reshard_after_forward = False


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
