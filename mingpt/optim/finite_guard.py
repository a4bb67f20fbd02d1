"""Ends a run when a gradient or a loss is not finite."""

import math

import torch
from torch import Tensor

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError

MIN_LOSS_SCALE = 1e-4  # GradScaler halves its scale after each overflow; this minimum is from fairseq


def check_gradient(step: int, grad_norm: Tensor, scaler: torch.amp.GradScaler, config: OptimizerConfig) -> None:
    """Raises a UserError if the norm of a step's gradient is not finite. Reading the norm waits for a GPU.

    Not every step must be checked, since such a gradient makes the weights and all later gradients NaN. In fp16,
    GradScaler skips these updates and lowers its scale, which is checked instead.
    """
    if not scaler.is_enabled():
        check_finite(step, "norm of the gradient", grad_norm.item(), config)
    elif scaler.get_scale() < MIN_LOSS_SCALE:
        raise UserError(
            f"step {step}: in fp16, the gradients have overflowed at every loss scale down to {MIN_LOSS_SCALE:g}, and "
            "the weights no longer change; lower optimizer.learning_rate, or set trainer.precision to bf16 or fp32"
        )


def check_finite(step: int, name: str, value: float, config: OptimizerConfig) -> None:
    """Raises a UserError if a value of a step is not finite."""
    if math.isfinite(value):
        return
    clip = config.grad_norm_clip
    advice = "set optimizer.grad_norm_clip (null)" if clip is None else f"optimizer.grad_norm_clip ({clip:g})"
    raise UserError(
        f"step {step}: the {name} is not finite; no snapshot contains this step. "
        f"Lower optimizer.learning_rate ({config.learning_rate:g}) or {advice}"
    )
