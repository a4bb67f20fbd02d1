"""Computes the gradients of some steps twice, to find machines that compute wrong.

Processors that sometimes compute wrong, without an error, ended 6 of 419 interruptions of Llama 3's training ("silent
data corruption" in Grattafiori et al., 2024, table 5).
"""

import platform
from collections import defaultdict
from collections.abc import Callable, Mapping
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

Digests = dict[str, list[int]]


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
        _, own_before, reduced_before = _compute(strategy, compute)
    losses, own, reduced = _compute(strategy, compute)
    context = strategy.context
    differences = all_gather_object(context, (_difference(own_before, own), _difference(reduced_before, reduced)))
    places = all_gather_object(context, f"{platform.node()}, {context.device}")
    causes = [f"rank {rank} ({places[rank]}) {mine}" for rank, (mine, _) in enumerate(differences) if mine]
    if not causes and any(after for _, after in differences):
        causes = [f"a rank that is not known, because ranks had exchanged gradients, {max(differences)[1]}"]
    if causes:
        raise UserError(
            f"step {step}, computed twice, had other bits on {'; '.join(causes)}. Its hardware or a library is wrong: "
            "leave the machine out, and run the same command to resume from a snapshot before this step. If model.py "
            "itself makes passes differ, set trainer.replay_every to null"
        )
    return losses


def _compute(
    strategy: Strategy, compute: Callable[[], tuple[list[Tensor], list[Tensor]]]
) -> tuple[list[Tensor], Digests, Digests]:
    """Returns losses for `mean_loss`, and digests of what this rank computes, before and after ranks exchange it."""
    own: dict[str, list[Tensor]] = defaultdict(list)

    def record(name: str, gradient: Tensor) -> None:
        own[name].append(digest(gradient))

    hooks = []
    if strategy.context.world_size > 1:
        for name, parameter in strategy.parameters.items():
            if parameter.requires_grad and not hasattr(parameter, "to_local"):  # FSDP calls no hook
                hooks.append(parameter.register_hook(partial(record, name)))
    own_losses, losses = compute()
    for hook in hooks:
        hook.remove()
    own["loss"] = list(map(digest, own_losses))
    reduced = {name: [digest(to_local(gradient))] for name, gradient in strategy.gradients.items()}
    if strategy.context.world_size == 1:
        own |= reduced
    return losses, _numbers(own), _numbers(reduced)


def _numbers(digests: Mapping[str, list[Tensor]]) -> Digests:
    return {name: [int(value) for value in values] for name, values in digests.items()}


def _difference(before: Digests, after: Digests) -> str:
    names = [name for name in after if after[name] != before.get(name)]
    return f"in {len(names)} of {len(after)} tensors, such as {names[0]}" if names else ""


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
