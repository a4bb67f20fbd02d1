"""The state of model and optimizer as a whole, whatever part of it each rank holds.

Snapshots are written from it and loaded into it. One tensor at a time is gathered or broadcast, since no rank may have
memory for all. That is why torch.distributed.checkpoint.state_dict does not serve here; nor does it know
ZeroRedundancyOptimizer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.distributed.collectives import DistributedContext

OptimizerState = Mapping[str, Mapping[str, Tensor]]  # parameter name -> name of the tensor -> tensor
StateShapes = dict[str, dict[str, list[Any]]]  # the same, with [shape, name of the dtype] of each tensor


def state_shapes(state: OptimizerState) -> StateShapes:
    """Shapes and dtypes of optimizer state as plain data, for other ranks."""
    return {
        name: {key: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for key, tensor in tensors.items()}
        for name, tensors in state.items()
    }


class FullState:
    """What a strategy inherits. This class is for one that holds everything; others override what differs.

    Attributes:
        parameters: those of this rank, by GPT-2's names
        full_shapes: by GPT-2's names, tensors with the full shapes of all parameters
        is_sharded: a rank holds only a shard of something, so `iter_full_state` needs all ranks
    """

    context: DistributedContext
    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]
    full_shapes: Mapping[str, Tensor]
    is_sharded = False

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each parameter's name, full value and full optimizer state. All ranks iterate together.

        The next step may modify the tensors.
        """
        for name, parameter in self.parameters.items():
            yield name, parameter.detach(), dict(self.optimizer_state(parameter))

    def load_full_state(self, weights: Mapping[str, Tensor], state: OptimizerState, source: int) -> None:
        """Loads the full weights and optimizer state that rank `source` passes; those of other ranks are ignored."""
        for name, key, full in self.broadcast_full_state(weights, state, source):
            self.load_tensor(name, key, full)

    def broadcast_full_state(
        self, weights: Mapping[str, Tensor], state: OptimizerState, source: int
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Yields name, key and value of each tensor that rank `source` passes; weights have an empty key."""
        shapes = self.context.broadcast_object(state_shapes(state), source)
        for name, like in self.full_shapes.items():
            yield name, "", self.broadcast_tensor(source, weights.get(name), like)
            for key, tensor in self.broadcast_state(source, state.get(name, {}), shapes.get(name, {})).items():
                yield name, key, tensor

    @torch.no_grad()
    def load_tensor(self, name: str, key: str, full: Tensor) -> None:
        """Keeps this rank's part of a parameter, or, with a key, of that tensor of its optimizer state."""
        parameter = self.parameters[name]
        if not key:
            parameter.copy_(self.shard_of(full, parameter))
        elif self.updates(parameter):
            self.optimizer_state(parameter)[key] = self.shard_of(full, parameter)

    def local_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer state that this rank has, by the names of parameters."""
        return {
            name: self.optimizer_state(parameter)
            for name, parameter in self.parameters.items()
            if self.updates(parameter)
        }

    def optimizer_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """This rank's optimizer state of a parameter, which may be modified."""
        return self.optimizer.state[parameter]

    def updates(self, parameter: Tensor) -> bool:
        """Whether the optimizer of this rank updates the parameter, and has its state."""
        return True

    def shard_of(self, full: Tensor, parameter: Tensor) -> Tensor:
        """The part of a full tensor that this rank holds."""
        return full

    def broadcast_state(
        self, source: int, state: Mapping[str, Tensor], shapes: Mapping[str, list[Any]]
    ) -> dict[str, Tensor]:
        """Returns the optimizer state of one parameter that rank `source` passes.

        Args:
            shapes: what `state_shapes` has returned there for the parameter
        """
        full = {}
        for key, (shape, dtype) in shapes.items():
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            full[key] = self.broadcast_tensor(source, state.get(key), like)
        return full

    def broadcast_tensor(self, source: int, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Returns the tensor of rank `source`, with the shape and dtype of `like`, on the device of this rank."""
        full = torch.empty(like.shape, dtype=like.dtype, device=self.context.device)
        if tensor is not None and self.context.rank == source:
            full.copy_(tensor)
        self.context.broadcast_tensor(full, source)
        return full
