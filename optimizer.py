"""How do weights move? Parameter groups, AdamW or Muon, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights move: by Muon or AdamW (Loshchilov and Hutter, 2019), with warm-up and cosine decay (the same, 2017).

    Args:
        name: muon (on the blocks' matrices, and AdamW on the rest: learns more from each step) or adamw
        learning_rate: the highest, reached when the warm-up is over
        min_learning_rate: what the cosine ends at
        warmup_steps: steps of linear growth from 0 to learning_rate
        decay_steps: step at which the cosine has come down to min_learning_rate; null: the run's last step
        weight_decay: decay of matrices (not of biases and layer norms), multiplied by the learning rate
        betas: decay rates of the averages of gradient and squared gradient
        grad_norm_clip: longest gradient, as global norm; longer ones are shortened to it; null never shortens
    """

    name: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 3e-3
    min_learning_rate: float = 0.0
    warmup_steps: int = 100
    decay_steps: int | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    grad_norm_clip: float | None = 1.0

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"optimizer.learning_rate is {self.learning_rate}, must be above 0")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ValueError(
                f"optimizer.min_learning_rate is {self.min_learning_rate}, must be at least 0 and at most "
                f"optimizer.learning_rate, {self.learning_rate}"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps is {self.warmup_steps}, must be at least 0")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ValueError(f"optimizer.decay_steps is {self.decay_steps}, must be null or at least 1")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay}, must be at least 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {list(self.betas)}, both must be at least 0 and below 1")
        if self.grad_norm_clip is not None and self.grad_norm_clip <= 0:
            raise ValueError(f"optimizer.grad_norm_clip is {self.grad_norm_clip}, must be null or above 0")


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

    Both are PyTorch's. Muon's steps are as long as AdamW's would be (Liu et al., "Muon is Scalable for LLM Training",
    2025), so that one learning rate serves both.

    Args:
        groups: parameter groups; those with a true `muon` are Muon's
        settings: AdamW's
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, settings)
        self.muon = Muon([g for g in self.param_groups if g["muon"]], adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW([g for g in self.param_groups if not g["muon"]])
        self.muon.state = self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all weights; none where `found_inf` is 1, as fused AdamW does.

        On GPUs Muon moves its own all the same, for it would have to wait for the device to know: they are lost then,
        and the run ends at its next check.
        """
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or found_inf.device.type != "cpu" or not found_inf:
            self.muon.step()
        self.adamw.grad_scale, self.adamw.found_inf = None, found_inf  # type: ignore[attr-defined]
        self.adamw.step()


def parameter_groups(
    parameters: Iterable[nn.Parameter], hidden: Iterable[nn.Parameter], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Who moves what: matrices, the hidden ones apart if they are Muon's, and all that does not decay.

    Args:
        parameters: all
        hidden: those inside the model, which neither embed nor predict
        config: how they move
    """
    parameters, inside = list(parameters), {*hidden}
    matrices = [p for p in parameters if p.dim() >= 2]
    muons = [p for p in matrices if config.name == "muon" and p in inside]
    groups = [
        {"params": muons, "weight_decay": config.weight_decay, "muon": True},
        {"params": [p for p in matrices if p not in {*muons}], "weight_decay": config.weight_decay, "muon": False},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "muon": False},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    hidden: Iterable[nn.Parameter],
    config: OptimizerConfig,
    dealt_out: Callable[..., Optimizer] | None = None,
) -> Optimizer:
    """AdamW in one fused pass, with weight decay on matrices only; with muon, hidden matrices are Muon's.

    Args:
        parameters: what moves
        hidden: those inside the model, which neither embed nor predict
        config: how
        dealt_out: what builds an optimizer over ranks, as ZeroRedundancyOptimizer does, from groups, class and settings
    """
    groups = parameter_groups(parameters, hidden, config)
    kind: type[Optimizer] = MuonWithAdamW if config.name == "muon" else AdamW
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    return dealt_out(groups, kind, **settings) if dealt_out else kind(groups, **settings)
