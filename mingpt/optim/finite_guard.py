"""Ends a run when a gradient or a loss is not finite."""

import math

import torch
from torch import Tensor

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError

MIN_LOSS_SCALE = 1e-4  # GradScaler halves its scale after each overflow; this minimum is from fairseq


class FiniteGuard:
    """Raises a UserError when a gradient or a loss is not finite.

    Reading a value waits for a GPU, so the largest norm of all gradients stays there until `check` reads it, where the
    caller waits anyway: before each log line and each snapshot. In fp16, GradScaler skips updates with gradients that
    are not finite, and `check` reads its scale.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device, config: OptimizerConfig) -> None:
        self.scaler = scaler
        self.config = config
        self.largest_norm = torch.zeros((), device=device)

    def watch(self, grad_norm: Tensor) -> None:
        """Records the norm of a step's gradient. All ranks have the same norm."""
        if not self.scaler.is_enabled():
            self.largest_norm = torch.maximum(self.largest_norm, grad_norm)  # NaN if one of them is

    def check(self, step: int) -> None:
        """Waits for the device, and raises a UserError if the norm of any gradient so far is not finite."""
        if self.scaler.is_enabled() and self.scaler.get_scale() < MIN_LOSS_SCALE:
            raise UserError(
                f"step {step}: in fp16, the gradients have overflowed at every loss scale down to "
                f"{MIN_LOSS_SCALE:g}, and the weights no longer change: lower optimizer.learning_rate, or set "
                "trainer.precision to bf16 or fp32"
            )
        self.check_value(step, "norm of the gradient", self.largest_norm.item())

    def check_value(self, step: int, name: str, value: float) -> None:
        """Raises a UserError if a value of a step is not finite."""
        if math.isfinite(value):
            return
        clip = self.config.grad_norm_clip
        advice = "set optimizer.grad_norm_clip (null)" if clip is None else f"optimizer.grad_norm_clip ({clip:g})"
        raise UserError(
            f"step {step}: the {name} is not finite; no snapshot contains this step. "
            f"Lower optimizer.learning_rate ({self.config.learning_rate:g}) or {advice}"
        )
