"""Ends a run when a gradient or a loss is not finite."""

import math

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError


def check_finite(step: int, name: str, value: float, config: OptimizerConfig) -> None:
    """Raises a UserError if a value of a step is not finite.

    Not every step must be checked, since a gradient that is not finite makes the weights and all later gradients NaN.
    """
    if not math.isfinite(value):
        raise UserError(
            f"step {step}: the {name} is not finite; no snapshot contains this step. Lower optimizer.learning_rate "
            f"({config.learning_rate:g}) or optimizer.grad_norm_clip ({config.grad_norm_clip})"
        )
