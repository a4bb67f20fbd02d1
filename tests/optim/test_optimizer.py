"""The learning-rate schedule, parameter groups, and steps that found_inf skips."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from mingpt.config.schema import OptimizerConfig
from mingpt.optim.optimizer import build_optimizer, learning_rate

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10)


def test_the_learning_rate_rises_linearly_then_falls_linearly_to_the_minimum() -> None:
    rates = {step: learning_rate(step, 110, CONFIG) for step in range(1, 200)}
    for step in range(1, 11):
        assert rates[step] == pytest.approx(step / 10)
    for step in range(10, 111):
        assert rates[step] == pytest.approx(1 - 0.8 * (step - 10) / 100)
    assert rates[60] == pytest.approx(0.6)
    assert {rates[step] for step in range(110, 200)} == {0.2}


def test_decay_steps_overrides_the_last_step() -> None:
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10, decay_steps=30)
    for step in range(1, 50):
        assert learning_rate(step, 1000, config) == learning_rate(step, 30, CONFIG)
    assert learning_rate(20, 20, config) == pytest.approx(0.6)  # a run that ends in the middle of the decay


@pytest.mark.parametrize("decay_steps", [None, 1, 9, 10])
def test_warm_up_takes_precedence_over_a_decay_that_ends_before_it(decay_steps: int | None) -> None:
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10, decay_steps=decay_steps)
    for last_step in (1, 5, 10):
        rates = [learning_rate(step, last_step, config) for step in range(1, 13)]
        assert rates == pytest.approx([n / 10 for n in range(1, 11)] + [0.2, 0.2])


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model.blocks = [model[1]]
    return model


def set_random_gradients(model: nn.Module, seed: int) -> None:
    """Sets gradients with magnitudes from 1e-8, where AdamW's epsilon matters, to 1."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 10 ** (-8 * torch.rand_like(parameter))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_parameter_is_in_one_group_and_adamw_is_fused(name: Literal["adamw", "muon"]) -> None:
    model = network()
    groups = build_optimizer(model, OptimizerConfig(name=name)).param_groups
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(map(id, model.parameters()))
    assert all(group["fused"] for group in groups)
    muon = [p for group in groups if group["muon"] for p in group["params"]]
    assert list(map(id, muon)) == ([id(model[1].weight)] if name == "muon" else [])


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns copies of all weights, moments and counters."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {f"{name} {key}": tensor.clone() for key, tensor in optimizer.state[parameter].items()}
    return state


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("steps", [0, 3])
def test_found_inf_skips_weights_moments_and_counters(steps: int) -> None:
    """So GradScaler can skip a step of fp16 without a device synchronization."""
    model, undisturbed = network(), network()
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    reference = build_optimizer(undisturbed, OptimizerConfig(name="muon"))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, found_inf: float = 0.0) -> None:
        set_random_gradients(model, seed)
        if found_inf:
            for parameter in model.parameters():
                parameter.grad.fill_(math.nan)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
        optimizer.step()

    for seed in range(steps):
        step(model, optimizer, seed)
        step(undisturbed, reference, seed)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = full_state(model, optimizer)
    step(model, optimizer, seed=100, found_inf=1.0)
    assert equal(model.state_dict(), weights)
    assert equal(full_state(model, optimizer), before) or not steps  # the first step creates the moments
    assert {float(state["step"]) for state in optimizer.state.values() if "step" in state} == {steps}
    step(model, optimizer, seed=101)
    step(undisturbed, reference, seed=101)
    assert equal(full_state(model, optimizer), full_state(undisturbed, reference))
    assert not equal(model.state_dict(), weights)
