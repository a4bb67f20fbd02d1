import math
from pathlib import Path

import pytest
import torch

from mingpt.config.schema import OptimizerConfig
from mingpt.errors import UserError
from mingpt.optim.finite_guard import check_finite
from tests.helpers import run_args
from tests.inside import open_trainer


def check(step: int, norm: float) -> None:
    check_finite(step, "norm of the gradient", norm, OptimizerConfig())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_bad_norm_is_found_some_steps_later(clip: float | None, bad: float, text: Path, tmp_path: Path) -> None:
    """On a GPU, norms are read in steps with a log line or a snapshot."""
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
