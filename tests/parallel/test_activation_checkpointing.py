"""Activation checkpointing and stages, which are applied from outside, keep outputs, gradients and names."""

import pytest
import torch
from torch import Tensor

from mingpt.parallel.activation_checkpointing import apply_activation_checkpointing
from tests.inside import T, random_tokens, small_gpt


def loss_and_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    loss = model(random_tokens(3, T), random_tokens(3, T, seed=2))[1]
    loss.backward()
    return {"loss": loss, **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_recomputes_blocks_with_the_same_bits_and_dropout(mode: str) -> None:
    model, calls = small_gpt(dropout=0.2), []
    expected, names = loss_and_gradients(model), list(model.state_dict())
    model.zero_grad()
    model.blocks[0].mlp.act.register_forward_hook(lambda *_: calls.append(1))
    apply_activation_checkpointing(model, mode)
    found = loss_and_gradients(model)
    assert len(calls) == 2  # forward and backward
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert list(model.state_dict()) == names
