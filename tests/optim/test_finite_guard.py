"""Values that are not finite end a run with one message."""

import math

import pytest
import torch

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError
from mingpt.optim.finite_guard import FiniteGuard


def make_guard(scale: float | None = None, **keys: float | None) -> FiniteGuard:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    return FiniteGuard(scaler, torch.device("cpu"), OptimizerConfig(**keys))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_norm_is_found_some_steps_later(bad: float) -> None:
    """On a GPU, norms are read in steps with a log line or a snapshot."""
    guard = make_guard()
    guard.watch(torch.tensor(2.0))
    guard.check(1)
    for norm in (bad, 1.0):
        guard.watch(torch.tensor(norm))
    with pytest.raises(UserError, match=r"^step 3: the norm of the gradient is not finite; no snapshot contains"):
        guard.check(3)


@pytest.mark.parametrize(
    ("clip", "advice"), [(0.5, "or optimizer.grad_norm_clip (0.5)"), (None, "or set optimizer.grad_norm_clip (null)")]
)
def test_the_message_names_the_keys_to_change(clip: float | None, advice: str) -> None:
    guard = make_guard(learning_rate=0.25, grad_norm_clip=clip)
    guard.check_value(3, "loss", 1.0)
    with pytest.raises(UserError) as raised:
        guard.check_value(3, "loss", math.nan)
    assert str(raised.value).endswith(f"Lower optimizer.learning_rate (0.25) {advice}")


def test_gradients_that_overflow_at_every_loss_scale_end_the_run() -> None:
    guard = make_guard(scale=2e-4)
    guard.watch(torch.tensor(math.inf))  # GradScaler skips this step
    guard.check(1)
    guard = make_guard(scale=5e-5)  # as after two more overflows
    with pytest.raises(UserError, match=r"^step 2: in fp16, the gradients have overflowed at every loss scale"):
        guard.check(2)
