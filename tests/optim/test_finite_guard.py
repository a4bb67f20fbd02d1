import math
from pathlib import Path

import pytest
import torch

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError
from mingpt.optim.finite_guard import check_gradient
from tests.helpers import open_trainer, run_args


def check(step: int, norm: float, scale: float | None = None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    check_gradient(step, torch.tensor(norm), scaler, OptimizerConfig())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_bad_norm_is_found_some_steps_later(
    clip: float | None, bad: float, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, norms are read in steps with a log line or a snapshot."""
    monkeypatch.setenv("TEST_INIT_METHOD", "file:///unused")
    with open_trainer(*run_args(tmp_path / "run", text, optimizer__grad_norm_clip=clip)) as trainer:
        check(1, trainer.train_step().grad_norm.item())
        weight = trainer.model.blocks[0].mlp.c_fc.weight
        hook = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(0), bad))
        trainer.train_step()
        hook.remove()
        trainer.train_step()
        norm = trainer.train_step().grad_norm.item()
    with pytest.raises(UserError, match=r"^step 4: the norm of the gradient is not finite; no snapshot contains"):
        check(4, norm)


def test_gradients_that_overflow_at_every_loss_scale_end_the_run() -> None:
    check(1, math.inf, scale=2e-4)  # GradScaler skips this step
    with pytest.raises(UserError, match=r"^step 2: in fp16, the gradients have overflowed at every loss scale"):
        check(2, math.inf, scale=5e-5)  # as after two more overflows
