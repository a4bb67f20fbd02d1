"""Parameter groups, the optimizer, and the learning-rate schedule as a pure function of the step."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mingpt.config import OptimizerConfig
from mingpt.errors import UserError
from mingpt.muon import MuonWithAdamW, NewtonSchulz, newton_schulz

MIN_LOSS_SCALE = 1e-4  # of GradScaler, which halves its scale after each overflow; as in fairseq


def learning_rate(step: int, last_step: int, config: OptimizerConfig) -> float:
    """The learning rate of a step: linear warm-up, linear decay, then the minimum.

    Linear decay to zero learns more than a cosine: Defazio et al., "Optimal Linear Decay Learning Rate Schedules and
    Further Refinements", 2023; Bergsma et al., "Straight to Zero", 2025.

    Args:
        step: number of the step, from 1
        last_step: the end of the decay where `config.decay_steps` is null
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    end = config.decay_steps or last_step
    if step >= end:
        return config.min_learning_rate
    progress = (step - config.warmup_steps) / (end - config.warmup_steps)
    return config.learning_rate + progress * (config.min_learning_rate - config.learning_rate)


def param_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices of the blocks (for Muon), other matrices, and the rest, which has no weight decay.

    A group may be empty: a middle stage of a pipeline may have nothing but matrices of blocks.
    """
    hidden: set[nn.Parameter] = set()
    if config.name == "muon":
        hidden = {p for block in model.blocks for p in block.parameters() if p.dim() == 2}  # type: ignore[union-attr]
    others = [p for p in model.parameters() if p not in hidden]
    return [
        {"params": [p for p in model.parameters() if p in hidden], "weight_decay": config.weight_decay, "muon": True},
        {"params": [p for p in others if p.dim() == 2], "weight_decay": config.weight_decay, "muon": False},
        {"params": [p for p in others if p.dim() != 2], "weight_decay": 0.0, "muon": False},
    ]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    ns_dtype: torch.dtype = torch.float32,
    newton_schulz: NewtonSchulz = newton_schulz,
    wrapper: Callable[..., Optimizer] | None = None,
) -> Optimizer:
    """Fused AdamW (Loshchilov and Hutter, 2019), or Muon with AdamW.

    Args:
        ns_dtype: dtype of Muon's matrix products
        newton_schulz: function that orthogonalizes Muon's updates
        wrapper: builds an optimizer from groups, class and settings, as ZeroRedundancyOptimizer does
    """
    groups = param_groups(model, config)
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    cls: type[Optimizer] = AdamW
    if config.name == "muon":
        cls = MuonWithAdamW
        settings |= {"ns_dtype": ns_dtype, "newton_schulz": newton_schulz}
    return wrapper(groups, cls, **settings) if wrapper else cls(groups, **settings)


class FiniteGuard:
    """Makes the optimizer skip all updates from the first gradient on that is not finite, and reports that step.

    Nothing waits for a CUDA GPU: its fused kernels read GradScaler's `found_inf` on the device, and `check` is called
    where the caller waits anyway. On a CPU `watch` looks at once, since Muon would read all gradients once more for
    `found_inf`, and on MPS, whose kernels do not read it.
    In fp16 GradScaler itself skips updates, and the guard looks at the scale.

    Args:
        strategy: a Strategy, whose optimizer and scaler are used
        newest_snapshot: names it in the message
    """

    def __init__(self, strategy: Any, config: OptimizerConfig, newest_snapshot: Callable[[], str]) -> None:
        self.strategy = strategy
        self.config = config
        self.newest_snapshot = newest_snapshot
        self.bad_step: Tensor | None = None  # on the device; 0: all gradients so far were finite

    def watch(self, step: int, grad_norm: Tensor) -> None:
        """Looks at the norm of a step's gradient, before the update. All ranks have the same norm.

        Raises:
            UserError: it is not finite, on a device on which that is known at once.
        """
        if self.strategy.scaler.is_enabled():
            return
        if self.strategy.context.device.type in ("cpu", "mps"):
            if not math.isfinite(grad_norm.item()):
                self._raise(step)
            return
        if self.bad_step is None:
            self.bad_step = grad_norm.new_zeros(())
        is_first = (self.bad_step == 0) & ~grad_norm.isfinite()
        self.bad_step = torch.where(is_first, step, self.bad_step)
        self.strategy.optimizer.grad_scale = None
        self.strategy.optimizer.found_inf = (self.bad_step > 0).float()

    def check(self, step: int = 0, mean_loss: float = 0.0) -> None:
        """Waits for the device, and raises a UserError if a gradient, or this mean loss of a step, was not finite."""
        scaler = self.strategy.scaler
        if scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
            raise UserError(
                f"step {step}: in fp16, the gradients have overflowed at every loss scale down to "
                f"{MIN_LOSS_SCALE:g}, and the weights no longer change: lower optimizer.learning_rate, or set "
                "trainer.precision to bf16 or fp32"
            )
        bad_step = 0 if self.bad_step is None else int(self.bad_step)
        if not bad_step and not math.isfinite(mean_loss):
            bad_step = step
        if bad_step:
            self._raise(bad_step)

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
