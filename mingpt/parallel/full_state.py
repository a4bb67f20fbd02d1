"""The state of model and optimizer as a whole, whatever part of it each rank holds.

Snapshots are written from it and loaded into it. One tensor at a time is gathered or broadcast, since no rank may have
memory for all. That is why torch.distributed.checkpoint.state_dict does not serve here; nor does it know
ZeroRedundancyOptimizer.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from mingpt.distributed.agreement import broadcast_object
from mingpt.distributed.context import DistributedContext

OptimizerState = Mapping[str, Mapping[str, Tensor]]  # parameter name -> name of the tensor -> tensor


def state_keys(state: OptimizerState) -> dict[str, list[str]]:
    """The names of each parameter's optimizer state, as plain data for other ranks."""
    return {name: list(tensors) for name, tensors in state.items()}


class FullState:
    """What a strategy inherits. This class is for one that holds everything; others override what differs.

    Attributes:
        parameters: those of this rank, by GPT-2's names
        full_shapes: by GPT-2's names, tensors with the full shapes of all parameters
        local_state: the optimizer's own tensors of each parameter that this rank updates, by its name
        is_sharded: a rank holds only a shard of something, so `iter_full_state` needs all ranks
    """

    context: DistributedContext
    parameters: dict[str, nn.Parameter]
    full_shapes: Mapping[str, Tensor]
    local_state: dict[str, dict[str, Tensor]]
    is_sharded = False

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each parameter's name, full value and full optimizer state. All ranks iterate together.

        The next step may modify the tensors.
        """
        for name, parameter in self.parameters.items():
            yield name, parameter.detach(), dict(self.local_state[name])

    def load_full_state(self, weights: Mapping[str, Tensor], state: OptimizerState, source: int) -> None:
        """Loads the full weights and optimizer state that rank `source` passes; those of other ranks are ignored."""
        keys = broadcast_object(self.context, state_keys(state), source)
        for name in self.full_shapes:
            tensors = {}
            if self.context.rank == source:
                tensors = {"": weights[name], **state.get(name, {})}
            for key, full in self.broadcast_tensors(source, name, ["", *keys.get(name, [])], tensors):
                self.load_tensor(name, key, full)

    def broadcast_tensors(
        self, source: int, name: str, keys: Iterable[str], tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields key and full value of a parameter's tensors that rank `source` passes, on the device of this rank.

        Those of other ranks are ignored. AdamW's counter of steps has no dimension, all else the parameter's shape.
        """
        for key in keys:
            shape = () if key == "step" else self.full_shapes[name].shape
            full = torch.empty(shape, device=self.context.device)
            if self.context.rank == source:
                full.copy_(tensors[key])
            self.context.broadcast_tensor(full, source)
            yield key, full

    @torch.no_grad()
    def load_tensor(self, name: str, key: str, full: Tensor) -> None:
        """Keeps this rank's part of a parameter, or, with a key, of that tensor of its optimizer state."""
        parameter = self.parameters[name]
        if not key:
            parameter.copy_(self.shard_of(full, parameter))
        elif name in self.local_state:
            self.local_state[name][key] = self.shard_of(full, parameter)

    def shard_of(self, full: Tensor, parameter: Tensor) -> Tensor:
        """The part of a full tensor that this rank holds."""
        return full
