"""Messages about values that are not finite."""

import math

import pytest
import torch

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError
from mingpt.optim.finite_guard import FiniteGuard

NOT_FINITE = torch.tensor(math.nan)


@pytest.fixture
def guard() -> FiniteGuard:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return FiniteGuard(optimizer, scaler, torch.device("cpu"), OptimizerConfig())


@pytest.mark.parametrize("device", ["cpu", "mps"])  # kernels of MPS ignore `found_inf`
def test_a_gradient_is_named_before_the_update(device: str, guard: FiniteGuard) -> None:
    guard.device = torch.device(device)
    guard.watch(2, torch.tensor(1.0))
    with pytest.raises(UserError, match=r"^step 3: the norm of the gradient is not finite; it did not change any"):
        guard.watch(3, NOT_FINITE)


def test_on_a_gpu_the_first_such_step_is_named_when_the_run_waits(guard: FiniteGuard) -> None:
    guard.device = torch.device("cuda")
    guard.watch(2, torch.tensor(1.0))
    assert guard.optimizer.found_inf == 0
    for step in (3, 4):
        guard.watch(step, NOT_FINITE)
        assert guard.optimizer.found_inf == 1
    guard.watch(5, torch.tensor(1.0))
    assert guard.optimizer.found_inf == 1  # all later updates are skipped, too
    with pytest.raises(UserError, match=r"^step 3: the norm of the gradient is not finite"):
        guard.check(5)


def test_a_loss_is_named_with_a_gradient_that_is_finite(guard: FiniteGuard) -> None:
    guard.check_loss(3, 1.0)
    with pytest.raises(UserError, match=r"^step 3: the loss is not finite; no snapshot contains its update\. "):
        guard.check_loss(3, math.nan)


def test_gradients_that_overflow_at_every_loss_scale_end_the_run(guard: FiniteGuard) -> None:
    guard.scaler = torch.amp.GradScaler("cpu", init_scale=2e-4)
    guard.check(1)
    guard.scaler = torch.amp.GradScaler("cpu", init_scale=5e-5)  # as after two more overflows
    with pytest.raises(UserError, match=r"^step 2: in fp16, the gradients have overflowed at every loss scale"):
        guard.check(2)
