"""What people change in the loss, the data and the trained parameters has the same effect with every strategy."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from mingpt.nn.layers import IGNORE_INDEX
from tests.helpers import (
    T,
    max_relative_error,
    random_tokens,
    run_ranks,
    small_gpt,
    train_curves,
    write_text,
)
from tests.parallel.runs import (
    PIPELINE,
    STRATEGIES,
    Options,
    add_auxiliary_loss,
    count_one_token_only,
    freeze,
    with_stages,
)

ACCUMULATING: Options = PIPELINE | {"model__architecture": "gpt2"}
ON_TWO: list[Options] = [
    ACCUMULATING,
    {**ACCUMULATING, "trainer__micro_batch_size": None, "distributed__strategy": "zero1"},
    {**ACCUMULATING, "distributed__strategy": "fsdp", "trainer__activation_checkpointing": "full"},
    {**ACCUMULATING, "distributed__reduction": "tree", "optimizer__name": "adamw"},
    with_stages(2, model__architecture="gpt2", distributed__strategy="zero2"),
]
ON_FOUR = [
    with_stages(2, model__architecture="gpt2", trainer__micro_batch_size=size, distributed__strategy=strategy)
    for size, strategy in zip((1, 2, 1, 2), STRATEGIES, strict=True)
]


def _changed_curves(change: Callable[[], None], folder: Path, runs: list[Options]) -> list[list[float]]:
    change()
    return train_curves(folder, runs, 4)


@pytest.mark.parametrize(
    ("change", "ranks", "runs"),
    [
        (add_auxiliary_loss, 2, ON_TWO[:-1]),
        (count_one_token_only, 2, ON_TWO),
        (freeze, 2, ON_TWO),
        pytest.param(count_one_token_only, 4, ON_FOUR, marks=pytest.mark.slow),
    ],
)
def test_a_change_trains_with_the_same_losses_on_any_number_of_ranks(
    change: Callable[[], None], ranks: int, runs: list[Options], tmp_path: Path
) -> None:
    write_text(tmp_path / "text.txt")
    names = ("trainer__batch_size", "model__architecture", "model__n_layer", "optimizer__name")
    equal = [{name: options[name] for name in names if name in options} for options in runs]
    alone = [options for i, options in enumerate(equal) if options not in equal[:i]]
    curves = partial(run_ranks, tmp_path=tmp_path)
    [unchanged] = curves(1, train_curves, tmp_path, alone, 4)
    [expected] = curves(1, _changed_curves, change, tmp_path, alone)
    [found, *_] = curves(ranks, _changed_curves, change, tmp_path, runs)
    for options, losses, like in zip(runs, found, map(alone.index, equal), strict=True):
        assert max_relative_error(losses, expected[like]) < 1e-5, options
        assert max_relative_error(unchanged[like], expected[like]) > 1e-3, options


def test_a_batch_without_targets_is_a_loss_of_zero() -> None:
    model = small_gpt()
    _, loss = model(random_tokens(2, T), torch.full((2, T), IGNORE_INDEX))
    assert loss.item() == 0
    loss.backward()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
