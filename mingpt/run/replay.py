"""Computes the gradients of some steps twice, to find machines that compute wrong.

Silent data corruption was the cause of 6 of 419 unexpected interruptions of Llama 3's training (Grattafiori et al.,
"The Llama 3 Herd of Models", 2024, table 5).
"""

import platform
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from mingpt.distributed.agreement import all_gather_object
from mingpt.errors import UserError
from mingpt.optim.muon import to_local
from mingpt.parallel.strategy import Strategy
from mingpt.text.permutation import hash64

CHUNK = 2**20  # elements that are hashed at once


def compute_twice(
    strategy: Strategy, compute: Callable[[], tuple[list[Tensor], list[Tensor]]], step: int
) -> list[Tensor]:
    """Computes the gradients of a step twice, and returns the second losses for `mean_loss`. All ranks must call it.

    Args:
        compute: returns this rank's losses, and the losses for `mean_loss`

    Raises:
        UserError: on all ranks, if some bits differ; with the ranks that have computed them.
    """
    with strategy.kept_buffers():
        _, before = _compute(strategy, compute)
    losses, after = _compute(strategy, compute)
    context = strategy.context
    names = [name for name in after if after[name] != before.get(name)]
    difference = ""
    if names:
        place = f"rank {context.rank} ({platform.node()}, {context.device})"
        difference = f"{place} in {len(names)} of {len(after)} tensors, such as {names[0]}"
    differences = [each for each in all_gather_object(context, difference) if each]
    if differences:
        exchange = ""
        if context.world_size > 1 and strategy.config.distributed.uses_fsdp:
            exchange = "; unless it is the loss, another rank may be wrong, since sharded gradients were exchanged"
        raise UserError(
            f"step {step}, computed twice, had other bits on {'; '.join(differences)}{exchange}. The hardware or a "
            "library is wrong: leave the machine out, and run the same command to resume from a snapshot before this "
            "step. If model.py itself makes passes differ, set trainer.replay_every to null"
        )
    return losses


def _compute(
    strategy: Strategy, compute: Callable[[], tuple[list[Tensor], list[Tensor]]]
) -> tuple[list[Tensor], dict[str, list[int]]]:
    """Returns losses for `mean_loss`, and digests of this rank's losses and of its gradients, by name."""
    digests: dict[str, list[Tensor]] = defaultdict(list)

    def record(name: str, gradient: Tensor) -> None:
        digests[name].append(digest(gradient))

    hooks = []
    if strategy.context.world_size > 1:  # before ranks exchange gradients
        for name, parameter in strategy.parameters.items():
            if parameter.requires_grad and not hasattr(parameter, "to_local"):  # FSDP does not call hooks
                hooks.append(parameter.register_hook(partial(record, name)))
    own_losses, losses = compute()
    for hook in hooks:
        hook.remove()
    digests["loss"] = list(map(digest, own_losses))
    for name, gradient in strategy.gradients.items():
        if name not in digests:
            record(name, to_local(gradient))
    return losses, {name: [int(value) for value in values] for name, values in digests.items()}


def digest(tensor: Tensor) -> Tensor:
    """Returns an int64 scalar that depends on all bits of a tensor and on their places.

    `torch.hash_tensor` does not depend on the places, so exchanged rows would not change it (PyTorch 2.13).
    """
    bits = tensor.detach().flatten().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    factors = _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK):
        total = total * factors[0] + (chunk * factors[: len(chunk)]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    """Returns odd factors, so that each bit of an element changes its product."""
    return torch.from_numpy(hash64(np.arange(CHUNK)).view(np.int64)).to(device) | 1
