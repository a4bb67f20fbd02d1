"""A guard against gradients and losses that are not finite."""

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError

MIN_LOSS_SCALE = 1e-4  # of GradScaler, which halves its scale after each overflow; as in fairseq


class FiniteGuard:
    """Makes the optimizer skip all updates from the first gradient on that is not finite, and reports that step.

    Nothing waits for a CUDA GPU: its fused kernels read GradScaler's `found_inf` on the device, and `check` is called
    where the caller waits anyway. On a CPU `watch` looks at once, since Muon would read all gradients once more for
    `found_inf`, and on MPS, whose kernels do not read it.
    In fp16 GradScaler itself skips updates, and the guard looks at the scale.

    Args:
        optimizer: skips the updates
        newest_snapshot: returns the path of the newest snapshot, for the message
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        device: torch.device,
        config: OptimizerConfig,
        newest_snapshot: Callable[[], str],
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.device = device
        self.config = config
        self.newest_snapshot = newest_snapshot
        self.bad_step = torch.zeros((), device=device)  # 0: all gradients so far were finite

    def watch(self, step: int, grad_norm: Tensor) -> None:
        """Looks at the norm of a step's gradient, before the update. All ranks have the same norm.

        Raises:
            UserError: it is not finite, on a device on which that is known at once.
        """
        if self.scaler.is_enabled():
            return
        if self.device.type in ("cpu", "mps"):
            if not math.isfinite(grad_norm.item()):
                self._raise(step)
            return
        is_first = (self.bad_step == 0) & ~grad_norm.isfinite()
        self.bad_step = torch.where(is_first, step, self.bad_step)
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = (self.bad_step > 0).float()  # type: ignore[attr-defined]

    def check(self, step: int) -> None:
        """Waits for the device, and raises a UserError if a gradient so far was not finite."""
        if self.scaler.is_enabled() and self.scaler.get_scale() < MIN_LOSS_SCALE:
            raise UserError(
                f"step {step}: in fp16, the gradients have overflowed at every loss scale down to "
                f"{MIN_LOSS_SCALE:g}, and the weights no longer change: lower optimizer.learning_rate, or set "
                "trainer.precision to bf16 or fp32"
            )
        if self.bad_step > 0:
            self._raise(int(self.bad_step))

    def check_loss(self, step: int, loss: float) -> None:
        """Raises a UserError if the loss of a step is not finite."""
        if not math.isfinite(loss):
            self._raise(step)

    def _raise(self, bad_step: int) -> NoReturn:
        raise UserError(
            f"step {bad_step}: the loss is not finite; no weight and no snapshot was changed by it. "
            f"Newest snapshot: {self.newest_snapshot()}. Lower optimizer.learning_rate "
            f"({self.config.learning_rate:g}) or optimizer.grad_norm_clip ({self.config.grad_norm_clip or 'null'})"
        )

    def check_val_loss(self, step: int, val_loss: float) -> None:
        """Raises a UserError if the validation loss of a step is not finite."""
        if not math.isfinite(val_loss):
            raise UserError(
                f"step {step}: the validation loss is not finite, so its update made weights that are not; no "
                f"snapshot has them. Lower optimizer.learning_rate ({self.config.learning_rate:g})"
            )
