"""The full state of model and optimizer, while each rank may hold only a part of it.

Snapshots are written from this state and loaded into it. Tensors are gathered and broadcast one at a time, because a
rank may not have memory for all of them. torch.distributed.checkpoint.state_dict does not do that, and it does not
support ZeroRedundancyOptimizer.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from mingpt.distributed.agreement import broadcast_object
from mingpt.distributed.context import DistributedContext

OptimizerState = Mapping[str, Mapping[str, Tensor]]  # parameter name -> key -> tensor


def state_shapes(state: OptimizerState) -> dict[str, dict[str, list[int]]]:
    """Returns the keys and shapes of each parameter's optimizer state, as plain data for other ranks."""
    return {name: {key: list(tensor.shape) for key, tensor in tensors.items()} for name, tensors in state.items()}


class FullState:
    """Base class of `Strategy`. Its methods are for ranks that hold everything; sharded strategies override them.

    Attributes:
        parameters: parameters of this rank, by GPT-2's names
        full_shapes: tensors with the full shapes of all parameters, by GPT-2's names
        local_state: optimizer state of each parameter that this rank updates, by the parameter's name
        is_sharded: each rank holds only a part of the state, so all ranks must call `iter_full_state`
    """

    context: DistributedContext
    parameters: dict[str, nn.Parameter]
    full_shapes: Mapping[str, Tensor]
    local_state: dict[str, dict[str, Tensor]]
    is_sharded = False

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Yields each parameter's name, full value and full optimizer state. All ranks iterate together.

        The next step may modify the tensors.
        """
        for name, parameter in self.parameters.items():
            yield name, parameter.detach(), dict(self.local_state[name])

    def load_full_state(self, weights: Mapping[str, Tensor], state: OptimizerState, source: int) -> None:
        """Loads the full weights and optimizer state of rank `source`; other ranks' arguments are ignored."""
        shapes = broadcast_object(self.context, state_shapes(state), source)
        for name, parameter in self.full_shapes.items():
            weight = self.broadcast(weights, name, parameter.shape, source)
            if name in self.parameters:
                self.parameters[name].detach().copy_(self.shard_of(weight, name))
            for key, shape in shapes.get(name, {}).items():
                tensor = self.broadcast(state.get(name, {}), key, shape, source)
                if name in self.local_state:
                    self.local_state[name][key] = self.shard_of(tensor, name)

    def broadcast(self, tensors: Mapping[str, Tensor], name: str, shape: Sequence[int], source: int) -> Tensor:
        """Returns rank `source`'s tensor of this name on the device of this rank; it ignores other ranks' tensors."""
        full = torch.empty(shape, device=self.context.device)
        if self.context.rank == source:
            full.copy_(tensors[name])
        self.context.broadcast_tensor(full, source)
        return full

    def shard_of(self, full: Tensor, name: str) -> Tensor:
        """Returns this rank's part of a full tensor that belongs to a parameter of this rank."""
        return full
