"""The schedule, which weights decay, AdamW by hand, Muon beside it, and state that moves to another optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mingpt.config import OptimizerConfig
from mingpt.optimizer import build_optimizer, learning_rate, newton_schulz

# The learning rate.

KNOBS = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10)


def test_warm_up_is_linear_from_the_first_step_to_the_peak() -> None:
    assert [learning_rate(step, 110, KNOBS) for step in range(1, 11)] == pytest.approx([n / 10 for n in range(1, 11)])


def test_the_cosine_falls_from_the_peak_to_the_minimum_at_the_last_step_and_stays() -> None:
    rates = {step: learning_rate(step, 110, KNOBS) for step in range(10, 200)}
    for step in range(10, 111):
        assert rates[step] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * (step - 10) / 100)) / 2)
    assert rates[60] == pytest.approx(0.6)
    assert {rates[step] for step in range(110, 200)} == {0.2}


def test_decay_steps_overrides_the_last_step() -> None:
    knobs = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10, decay_steps=30)
    assert [learning_rate(s, 1000, knobs) for s in range(1, 50)] == [learning_rate(s, 30, KNOBS) for s in range(1, 50)]
    assert learning_rate(20, 20, knobs) == pytest.approx(0.6)  # a run that ends in the middle of the decay


def test_without_warm_up_the_decay_starts_at_once() -> None:
    knobs = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
    assert learning_rate(1, 100, knobs) == pytest.approx((1 + math.cos(math.pi / 100)) / 2)
    assert learning_rate(1, 1, knobs) == 0.0


@pytest.mark.parametrize("decay_steps", [None, 1, 9, 10])
def test_a_warm_up_as_long_as_the_run_or_longer(decay_steps: int | None) -> None:
    knobs = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10, decay_steps=decay_steps)
    for last_step in (1, 5, 10):
        rates = [learning_rate(step, last_step, knobs) for step in range(1, 13)]
        assert rates == pytest.approx([n / 10 for n in range(1, 11)] + [0.2, 0.2])


def test_the_learning_rate_depends_on_nothing_but_its_arguments() -> None:
    forth = [learning_rate(step, 60, KNOBS) for step in range(1, 80)]
    back = [learning_rate(step, 60, KNOBS) for step in reversed(range(1, 80))]
    assert forth == back[::-1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", -1.0),
        ("min_learning_rate", -0.1),
        ("min_learning_rate", 1.0),
        ("warmup_steps", -1),
        ("decay_steps", 0),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("grad_norm_clip", 0.0),
        ("grad_norm_clip", -1.0),
    ],
)
def test_bad_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"optimizer\.{key} is ") as caught:
        OptimizerConfig(**{key: value})
    assert str(list(value) if key == "betas" else value) in str(caught.value)


# AdamW.


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model.blocks = [model[1]]
    return model


def draw_gradients(model: nn.Module, seed: int) -> None:
    """Gradients of all sizes from 1e-8, where AdamW's epsilon counts, to 1."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 10 ** (-8 * torch.rand_like(parameter))


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all weights, moments and counters."""
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": tensor.clone() for key, tensor in optimizer.state[parameter].items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_weight_decay_shrinks_matrices_and_nothing_else() -> None:
    model = network()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", learning_rate=0.5, weight_decay=0.1))
    optimizer.step()
    for parameter in model.parameters():
        expected = 0.95 if parameter.dim() >= 2 else 1.0
        assert torch.allclose(parameter, torch.full_like(parameter, expected))


def test_every_parameter_moves_in_one_fused_pass() -> None:
    model = network()
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw"))
    groups = optimizer.param_groups
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(map(id, model.parameters()))
    assert all(group["fused"] for group in groups)


def test_steps_equal_those_of_adamw_by_hand() -> None:
    model, beta1, beta2, decay = network(), 0.8, 0.95, 0.3
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", betas=(beta1, beta2), weight_decay=decay))
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in weights.items()}
    square = {name: torch.zeros_like(p) for name, p in weights.items()}
    for step, rate in enumerate((1e-2, 3e-2, 2e-2), start=1):
        draw_gradients(model, seed=step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, parameter in model.named_parameters():
            gradient, p = parameter.grad.double(), weights[name]
            mean[name] = beta1 * mean[name] + (1 - beta1) * gradient
            square[name] = beta2 * square[name] + (1 - beta2) * gradient**2
            move = mean[name] / (1 - beta1**step) / ((square[name] / (1 - beta2**step)).sqrt() + 1e-8)
            weights[name] = p - rate * (decay if p.dim() >= 2 else 0) * p - rate * move
            assert (parameter - weights[name]).abs().max() < 1e-6, (step, name)


# Muon.


class Blocks(nn.Module):
    """Two blocks with matrices of three shapes, tall, wide and square, in other than pairs; and what is around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(6, 9), (9, 6), (6, 6), (6, 9)]
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(*size) for size in sizes) for _ in range(2))
        self.wte = nn.Embedding(11, 6)


@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32])
def test_muon_moves_the_blocks_matrices_and_adamw_all_else_as_pytorchs_do_alone(products: torch.dtype) -> None:
    model, alone = Blocks(), Blocks()
    knobs = OptimizerConfig(name="muon", weight_decay=0.3)
    optimizer = build_optimizer(model, knobs, products)
    hidden = [p for p in alone.blocks.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(hidden, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    vectors = [p for p in alone.parameters() if p.dim() == 1]
    groups = [{"params": [alone.wte.weight], "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=knobs.betas, fused=True)
    for step, rate in enumerate((1e-2, 3e-2, 2e-2), start=1):
        before = {name: p.detach().clone() for name, p in alone.named_parameters()}
        draw_gradients(model, seed=step)
        draw_gradients(alone, seed=step)
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = rate
        optimizer.step()
        muon.step()
        adamw.step()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            if theirs in {*hidden}:
                assert (ours - theirs).norm() < 5e-2 * (theirs - before[name]).norm(), name  # theirs are in bf16
                with torch.no_grad():
                    ours.copy_(theirs)
            else:
                assert torch.equal(ours, theirs), name
    for parameter in hidden:
        assert muon.state[parameter].keys() == {"momentum_buffer"}
    assert {id(p) for p in optimizer.state if optimizer.state[p].keys() == {"momentum_buffer"}} == {
        id(p) for p in model.blocks.parameters() if p.dim() == 2
    }


@pytest.mark.parametrize("sizes", [(3, 8, 20), (3, 20, 8), (1, 8, 8), (0, 8, 8)])
def test_orthogonal_keeps_singular_vectors_and_brings_values_near_1(sizes: tuple[int, ...]) -> None:
    gradients = torch.randn(sizes, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = newton_schulz(gradients, torch.float32, torch.empty(sizes[1:]))
    left, values, right = torch.linalg.svd(gradients.double(), full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    assert torch.allclose(found.double(), left @ torch.diag_embed(values) @ right, atol=1e-4)
    assert ((values > 0.6) & (values < 1.3)).all()
    assert found.shape == sizes
    zeros = torch.zeros(1, 4, 5)
    assert torch.equal(newton_schulz(zeros, torch.float32, zeros[0]), zeros)


def test_a_part_of_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a part, \(2, 5\), of \(4, 5\)"):
        newton_schulz(torch.zeros(1, 2, 5), torch.float32, torch.zeros(4, 5))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("steps", [0, 3])
def test_found_inf_leaves_weights_moments_and_counters_alone(steps: int, name: Any) -> None:
    """The trainer relies on this to skip a step without asking the device whether its gradient is finite."""
    model, straight = network(), network()
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    reference = build_optimizer(straight, OptimizerConfig(name=name))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, skip: float) -> None:
        draw_gradients(model, seed)
        if skip:
            for parameter in model.parameters():
                parameter.grad.fill_(math.nan)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(skip)
        optimizer.step()

    for seed in range(steps):
        step(model, optimizer, seed, skip=0.0)
        step(straight, reference, seed, skip=0.0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = bits(model, optimizer)
    step(model, optimizer, seed=100, skip=1.0)
    assert same(model.state_dict(), weights)
    assert same(bits(model, optimizer), before) or not steps  # before the first step there are no moments yet
    assert {float(state["step"]) for state in optimizer.state.values() if "step" in state} == {steps}
    step(model, optimizer, seed=101, skip=0.0)
    step(straight, reference, seed=101, skip=0.0)
    assert same(bits(model, optimizer), bits(straight, reference))
    assert not same(model.state_dict(), weights)
