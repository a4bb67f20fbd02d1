"""How do weights move? Parameter groups, AdamW or Muon, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mingpt.config import OptimizerConfig
from mingpt.distributed.process_group import to_local

MOMENTUM = 0.95  # Muon's, with Nesterov's look ahead


def learning_rate(step: int, last_step: int, config: OptimizerConfig) -> float:
    """The learning rate of step 1, 2, ... : linear warm-up, then a cosine down to `decay_steps`, then the minimum.

    Args:
        step: number of the step, from 1
        last_step: the run's last, where `config.decay_steps` is null
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    end = config.decay_steps or last_step
    if step >= end:
        return config.min_learning_rate
    progress = (step - config.warmup_steps) / (end - config.warmup_steps)
    drop = config.learning_rate - config.min_learning_rate
    return config.min_learning_rate + drop * 0.5 * (1 + math.cos(math.pi * progress))


class MuonWithAdamW(Optimizer):
    """Muon (Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) for some groups, AdamW for others.

    Muon's steps are as long as AdamW's would be (Liu et al., "Muon is Scalable for LLM Training", 2025), so that one
    learning rate serves both. They are torch.optim.Muon's with `match_rms_adamw`. What that lacks is here: matrices of
    one shape in one product, products in any precision, matrices of which each rank holds some rows, and `found_inf`.

    Args:
        groups: parameter groups; those with a true `muon` are Muon's
        settings: AdamW's; of Muon, `ns_dtype` is the precision of its matrix products, `newton_schulz` what makes them
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, settings)
        self.adamw = AdamW([g for g in self.param_groups if not g["muon"]])
        self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all weights; none where `found_inf` is 1, as fused AdamW does, without waiting for the device."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"] if group["muon"] else ():
                alike[parameter.shape].append(parameter)
            for matrices in alike.values():
                self._move(matrices, group, found_inf)
        self.adamw.grad_scale, self.adamw.found_inf = None, found_inf  # type: ignore[attr-defined]
        self.adamw.step()

    def _move(self, matrices: list[nn.Parameter], group: dict[str, Any], found_inf: Tensor | None) -> None:
        """Muon's step for matrices of one shape."""
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        means = [to_local(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = [to_local(matrix.grad) for matrix in matrices]  # type: ignore[arg-type]
        moves: float | Tensor = 1.0
        if found_inf is not None:
            moves = 1 - found_inf
            gradients = [torch.where(found_inf > 0, *both) for both in zip(means, gradients, strict=True)]
        torch._foreach_lerp_(means, gradients, 1 - MOMENTUM)
        ahead = torch.stack(torch._foreach_lerp(gradients, means, MOMENTUM))
        like = matrices[0]
        directions = group["newton_schulz"](ahead, group["ns_dtype"], like)
        weights, rate = [to_local(matrix.detach()) for matrix in matrices], group["lr"] * moves
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(weights, [*(directions * (rate * 0.2 * math.sqrt(max(like.shape))))])


def newton_schulz(gradients: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Matrices with the same singular vectors, and singular values near 1: (k, m, n) -> (k, m, n), in fp32.

    Jordan's five quintic Newton-Schulz steps, whose coefficients grow small values as fast as they can.

    Args:
        gradients: k matrices
        dtype: of the products
        like: one of the parameters that they are for

    Raises:
        ValueError: these are not the whole matrices.
    """
    if gradients.shape[1:] != like.shape:
        raise ValueError(f"a part, {tuple(gradients.shape[1:])}, of {tuple(like.shape)} has other singular vectors")
    tall = gradients.size(1) > gradients.size(2)
    x = gradients.mT if tall else gradients
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(5):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).float()


def param_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Who moves what: the blocks' matrices apart if they are Muon's, other matrices, and all that does not decay.

    Args:
        model: whose parameters move; its `blocks` are asked for with muon alone
        config: how they move
    """
    hidden: set[nn.Parameter] = set()
    if config.name == "muon":
        hidden = {p for block in model.blocks for p in block.parameters() if p.dim() >= 2}  # type: ignore[union-attr]
    others = [p for p in model.parameters() if p not in hidden]
    groups = [
        {"params": [p for p in model.parameters() if p in hidden], "weight_decay": config.weight_decay, "muon": True},
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay, "muon": False},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "muon": False},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    ns_dtype: torch.dtype = torch.float32,
    newton_schulz: Callable[[Tensor, torch.dtype, Tensor], Tensor] = newton_schulz,
    dealt_out: Callable[..., Optimizer] | None = None,
) -> Optimizer:
    """AdamW in one fused pass, with weight decay on matrices only; with muon, the blocks' matrices are Muon's.

    Args:
        model: whose parameters move
        config: how
        ns_dtype: precision of Muon's matrix products
        newton_schulz: what makes them
        dealt_out: what builds an optimizer over ranks, as ZeroRedundancyOptimizer does, from groups, class and settings
    """
    groups = param_groups(model, config)
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    kind: type[Optimizer] = AdamW
    if config.name == "muon":
        kind, settings = MuonWithAdamW, settings | {"ns_dtype": ns_dtype, "newton_schulz": newton_schulz}
    return dealt_out(groups, kind, **settings) if dealt_out else kind(groups, **settings)
