"""The state of a rank, and its exchange with other ranks: what snapshots contain."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.distributed.agreement import broadcast_object
from mingpt.distributed.context import DistributedContext

OptimizerState = Mapping[str, Mapping[str, Tensor]]  # parameter name -> key -> tensor
FullState = Iterator[tuple[str, Tensor, dict[str, Tensor]]]  # name in the state dict, full value, optimizer state
Groups = list[dict[str, Any]]  # of an optimizer's parameters
Layout = tuple[list[int], str]  # shape and dtype


def layout(tensor: Tensor) -> Layout:
    """Returns shape and dtype as plain data for other ranks."""
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def state_layouts(state: OptimizerState) -> dict[str, dict[str, Layout]]:
    """Returns the layouts of each parameter's optimizer state, by key."""
    return {name: {key: layout(tensor) for key, tensor in tensors.items()} for name, tensors in state.items()}


def parameter_names(model: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter, which are several for a head that is tied to the embedding."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


class RankState:
    """Parameters, buffers and optimizer state of a rank. Each strategy distributes them in another way.

    Attributes:
        full_model: the model with the parameters of this rank
        parameters: parameters of this rank, by GPT-2's names
        full_shapes: tensors with the full shapes of the state of all ranks, by name
        local_state: optimizer state of each parameter that this rank updates, by the parameter's name
        optimizer: its step updates all parameters on all ranks
        built_groups: its parameter groups when it was built
    """

    context: DistributedContext
    full_model: Any
    parameters: dict[str, nn.Parameter]
    full_shapes: Mapping[str, Tensor]
    local_state: dict[str, dict[str, Tensor]]
    optimizer: torch.optim.Optimizer
    built_groups: Groups

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of this rank, by name; tied parameters have several names.

        They are read again each time, because a model may replace its buffers.
        """
        return self.full_model.state_dict(keep_vars=True)

    def changed_groups(self) -> Groups:
        """Returns the numbers that steps have changed in each parameter group, except for the learning rate."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "lr") and value is not built.get(key)}
            for group, built in zip(self.optimizer.param_groups, self.built_groups, strict=True)
        ]

    def load_changed_groups(self, changes: Groups) -> None:
        """Loads what `changed_groups` has returned, maybe on a rank with other groups."""
        for group, changed in zip(self.optimizer.param_groups, changes, strict=False):
            group.update(changed)

    def iter_full_state(self) -> FullState:
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

    def broadcast(self, tensors: Mapping[str, Tensor], name: str, layout: Layout, source: int) -> Tensor:
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
