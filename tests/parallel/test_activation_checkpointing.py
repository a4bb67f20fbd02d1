"""Activation checkpointing and stages, which are applied from outside, keep outputs, gradients and names."""

import pytest
import torch
from torch import Tensor

from mingpt.parallel.activation_checkpointing import apply_activation_checkpointing
from mingpt.parallel.pipeline import GPTStage
from model import KVCache
from tests.helpers import T, V, random_tokens, small_gpt

pytestmark = pytest.mark.usefixtures("one_thread")


def loss_and_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    loss = model(random_tokens(3, T), random_tokens(3, T, seed=2))[1]
    loss.backward()
    return {"loss": loss, **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("architecture", ["gpt2", "nanochat"])
def test_activation_checkpointing_recomputes_blocks_with_the_same_bits_and_dropout(
    architecture: str, mode: str
) -> None:
    model, calls = small_gpt(architecture=architecture, dropout=0.2), []
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


@pytest.mark.parametrize("num_stages", [2, 5])
@pytest.mark.parametrize("architecture", ["gpt2", "nanochat"])
def test_stages_compute_the_same_as_the_whole_model(architecture: str, num_stages: int) -> None:
    """Each parameter is in one stage, except for a tied wte, which is in two. Blocks are distributed evenly."""
    model = small_gpt(architecture=architecture, n_layer=5).eval()
    stages = [GPTStage(model.config, stage, num_stages).eval() for stage in range(num_stages)]
    for stage in stages:
        stage.load_state_dict({name: model.state_dict()[name] for name in stage.state_dict()})
    x = idx = random_tokens(3, T)
    for stage in stages:
        x = stage(x)
    assert x.shape == (3, T, V)
    assert torch.equal(x, model(idx)[0])
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted([*model.state_dict(), *["transformer.wte.weight"] * (architecture == "gpt2")])
    sizes = [len(stage.blocks) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    with torch.no_grad():
        caches = [KVCache(T) for _ in stages]
        for part in idx.split([T - 2, 1, 1], 1):
            x = part
            for stage, cache in zip(stages, caches, strict=True):
                x = stage(x, cache)
    assert torch.allclose(x, model(idx)[0][:, -1:], atol=1e-6)
