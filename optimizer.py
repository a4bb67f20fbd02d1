"""How do weights move? Parameter groups, AdamW, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights move: AdamW (Loshchilov and Hutter, 2019), with warm-up and cosine decay (the same, 2017).

    Args:
        learning_rate: the highest, reached when the warm-up is over
        min_learning_rate: what the cosine ends at
        warmup_steps: steps of linear growth from 0 to learning_rate
        decay_steps: step at which the cosine has come down to min_learning_rate; null: the run's last step
        weight_decay: decay of matrices (not of biases and layer norms), multiplied by the learning rate
        betas: decay rates of the averages of gradient and squared gradient
        grad_norm_clip: longest gradient, as global norm; longer ones are shortened to it; null never shortens
    """

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


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, dealt_out: Callable[..., Optimizer] | None = None
) -> Optimizer:
    """AdamW in one fused pass, with weight decay on matrices only.

    Args:
        parameters: what moves
        config: how
        dealt_out: what builds an optimizer over ranks, as ZeroRedundancyOptimizer does, from groups, class and settings
    """
    parameters = list(parameters)
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return dealt_out(groups, AdamW, **settings) if dealt_out else AdamW(groups, **settings)
