from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

from mingpt.config.schema import OptimizerConfig
from mingpt.optim import optimizer
from mingpt.optim.optimizer import build_optimizer, learning_rate

CONFIG = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10)


def test_the_learning_rate_rises_linearly_then_falls_linearly_to_the_minimum_at_decay_steps() -> None:
    rates = {step: learning_rate(step, 110, CONFIG) for step in range(1, 200)}
    for step in range(1, 11):
        assert rates[step] == pytest.approx(step / 10)
    for step in range(10, 111):
        assert rates[step] == pytest.approx(1 - 0.8 * (step - 10) / 100)
    assert {rates[step] for step in range(110, 200)} == {0.2}
    config = replace(CONFIG, decay_steps=110)  # overrides the last step, also of a run that ends before it
    for last_step in (20, 1000):
        assert rates == {step: learning_rate(step, last_step, config) for step in rates}


@pytest.mark.parametrize("decay_steps", [None, 1, 9, 10])
def test_warm_up_takes_precedence_over_a_decay_that_ends_before_it(decay_steps: int | None) -> None:
    config = replace(CONFIG, decay_steps=decay_steps)
    for last_step in (1, 5, 10):
        rates = [learning_rate(step, last_step, config) for step in range(1, 13)]
        assert rates == pytest.approx([n / 10 for n in range(1, 11)] + [0.2, 0.2])


def network() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model.blocks = {0: model[1]}
    model[1].table = nn.Parameter(torch.zeros(4, 8))  # such as one of biases for each head and distance
    return model


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_parameter_is_in_one_group_and_adamw_is_fused(name: Literal["adamw", "muon"]) -> None:
    """Muon takes the linear layers of blocks, and no other matrices."""
    model = network()
    groups = build_optimizer(model, OptimizerConfig(name=name)).param_groups
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(map(id, model.parameters()))
    assert all(group["fused"] for group in groups)
    muon = [p for group in groups if group["muon"] for p in group["params"]]
    assert list(map(id, muon)) == ([id(model[1].weight)] if name == "muon" else [])


def test_a_group_with_its_own_learning_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"params": list(network().parameters()), "muon": False, "lr": 0.1}
    monkeypatch.setattr(optimizer, "param_groups", lambda *_: [group])
    with pytest.raises(ValueError, match="use lr_scale, a factor"):
        build_optimizer(network(), OptimizerConfig())
