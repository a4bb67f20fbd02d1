"""Stops a run when a gradient or a loss is not finite."""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError

MIN_LOSS_SCALE = 1e-4  # GradScaler halves its scale after each overflow; this minimum is from fairseq


class FiniteGuard:
    """Makes the optimizer skip all updates after the first gradient that is not finite, and reports that step.

    Nothing waits for a CUDA GPU: fused kernels read GradScaler's `found_inf` on the device, and callers use `check`
    where they wait anyway. On CPU and MPS, `watch` raises the error at once: on a CPU, Muon would read all gradients
    again for `found_inf`, and MPS kernels ignore it. In fp16, GradScaler skips updates, and `check` reads its scale.

    Args:
        optimizer: optimizer that skips updates
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        device: torch.device,
        config: OptimizerConfig,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.device = device
        self.config = config
        self.bad_step = torch.zeros((), device=device)  # first step with a bad gradient; 0: there was none

    def watch(self, step: int, grad_norm: Tensor) -> None:
        """Checks the norm of a step's gradient before the update. All ranks have the same norm.

        Raises:
            UserError: on CPU and MPS, if the norm is not finite.
        """
        if self.scaler.is_enabled():
            return
        if self.device.type in ("cpu", "mps"):
            if not math.isfinite(grad_norm.item()):
                raise self._gradient_error(step)
            return
        is_first = (self.bad_step == 0) & ~grad_norm.isfinite()
        self.bad_step = torch.where(is_first, step, self.bad_step)
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = (self.bad_step > 0).float()  # type: ignore[attr-defined]

    def check(self, step: int) -> None:
        """Waits for the device, and raises a UserError if any gradient so far was not finite."""
        if self.scaler.is_enabled() and self.scaler.get_scale() < MIN_LOSS_SCALE:
            raise UserError(
                f"step {step}: in fp16, the gradients have overflowed at every loss scale down to "
                f"{MIN_LOSS_SCALE:g}, and the weights no longer change: lower optimizer.learning_rate, or set "
                "trainer.precision to bf16 or fp32"
            )
        if self.bad_step > 0:
            raise self._gradient_error(int(self.bad_step))

    def _gradient_error(self, step: int) -> UserError:
        return UserError(
            f"step {step}: the norm of the gradient is not finite; it did not change any weight or snapshot. "
            f"{self._advice()}"
        )

    def check_loss(self, step: int, loss: float) -> None:
        """Raises a UserError if the loss of a step is not finite."""
        if not math.isfinite(loss):
            raise UserError(f"step {step}: the loss is not finite; no snapshot contains its update. {self._advice()}")

    def _advice(self) -> str:
        clip = self.config.grad_norm_clip or "null"
        return f"Lower optimizer.learning_rate ({self.config.learning_rate:g}) or optimizer.grad_norm_clip ({clip})"

    def check_val_loss(self, step: int, val_loss: float) -> None:
        """Raises a UserError if the validation loss of a step is not finite."""
        if not math.isfinite(val_loss):
            raise UserError(
                f"step {step}: the validation loss is not finite: the last update produced non-finite weights; no "
                f"snapshot contains them. Lower optimizer.learning_rate ({self.config.learning_rate:g})"
            )
