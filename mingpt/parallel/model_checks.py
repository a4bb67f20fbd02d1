"""Checks a model, whose code may have changed, for what strategies and snapshots would lose.

`PipelineParallel` also compares its stages with the whole model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mingpt.errors import UserError
from mingpt.parallel.strategy import Strategy


def check_state(model: nn.Module) -> None:
    """Raises a UserError if parameters share memory, or the state dict does not consist of parameters and buffers."""
    parameters = dict(model.named_parameters())  # a tied one once
    buffers = dict(model.named_buffers())
    owners: dict[int, str] = {}
    for name, tensor in [*parameters.items(), *buffers.items()]:
        owner = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
        if owner != name and owner in parameters and tensor.numel() > 0:
            raise UserError(
                f"model.py: {owner} and {name} share memory, which training would separate; copy it, or assign the "
                "same nn.Parameter to both"
            )
    tensors = {id(tensor) for tensor in (*parameters.values(), *buffers.values())}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in tensors:
            raise UserError(f"model.py: {name} in the state dict must be a parameter or a buffer itself")


@torch.no_grad()
def check_forward(strategy: Strategy, example: tuple[Tensor, ...]) -> None:
    """Raises a UserError if a pass changes parameters, which ranks do not exchange, and which FSDP would lose.

    Args:
        example: arguments of the model
    """
    model = strategy.full_model
    norms: dict[nn.Module, dict[str, Tensor]] = {}

    def unsharded_norms(module: nn.Module) -> dict[str, Tensor]:
        return {
            name: parameter.norm()
            for name, parameter in module.named_parameters()
            if parameter.is_floating_point() and not hasattr(parameter, "to_local")
        }

    def before(module: nn.Module, args: Any) -> None:
        norms[module] = unsharded_norms(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for name, norm in unsharded_norms(module).items():
            if not torch.equal(norm, norms[module].get(name, norm)):
                raise UserError(
                    f"model.py: a forward pass changes the parameter {name}; with several ranks or shards, use a "
                    "buffer, or change it after a step"
                )

    hooks = []
    for module in (model, *dict.fromkeys(model.blocks.values())):
        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(after, prepend=True))  # before FSDP reshards
    with strategy.first_pass():
        model(*example)
    for hook in hooks:
        hook.remove()
