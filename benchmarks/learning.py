"""The case time_to_loss: training time until a loss is reached.

It uses main.py's text, `data.path`, because the loss depends on the text.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.baselines import NanoGPT
from benchmarks.harness import SMALL, Bench, Row, median_row
from mingpt.config.parser import read_config

SEEDS = (1, 2, 3)
RECIPE = SMALL | {"model.dropout": 0.0}  # nanoGPT's README: train_shakespeare_char.py on a CPU
RECIPE_STEPS = 2000
RECIPE_WARMUP = 100
# Steps of this program: its learning rate has decayed when it reaches the recipe's loss on tiny shakespeare.
STEPS = 320


class Run(NamedTuple):
    """Seconds of training without evaluation, number of steps, and the final loss on the whole validation text."""

    seconds: float
    steps: int
    loss: float

    def __str__(self) -> str:
        return f"{self.loss:.3f} after {self.steps:,} steps"


def time_to_loss(bench: Bench) -> Iterator[Row]:
    """Compares the training times until this program and nanoGPT's recipe for CPUs reach the recipe's loss."""
    ratios = []
    losses = []
    for seed in SEEDS:
        recipe = train_recipe(bench, seed)
        ours = train_to_loss(bench, seed, recipe.loss)
        losses.append(f"{ours} instead of {recipe}")
        if ours.loss <= recipe.loss:
            ratios.append(ours.seconds / recipe.seconds)
    what = f"training time to the loss of nanoGPT's CPU recipe: this program / the recipe ({', '.join(losses)})"
    missed = len(SEEDS) - len(ratios)
    if missed:
        yield Row(what, f"not reached by {missed} of {len(SEEDS)} runs")
    else:
        yield median_row(what, ratios)


def train_to_loss(bench: Bench, seed: int, target: float) -> Run:
    """Trains like main.py until the validation loss is at most `target`. Evaluates about ten times."""
    length = {"trainer.max_steps": STEPS, "trainer.eval_every": STEPS // 10}
    trainer = bench.build_trainer(_text(bench) | length, {"trainer.seed": seed}, warmup_steps=0)
    cfg = trainer.config.trainer
    seconds = 0.0
    loss = math.inf
    while trainer.progress.step < trainer.last_step and loss > target:
        seconds += bench.time_calls(trainer.train_step, min(cfg.eval_every, trainer.last_step - trainer.progress.step))
        trainer.evaluate()
        loss = trainer.progress.lowest["val_loss"]
    return Run(seconds, trainer.progress.step, loss)


def train_recipe(bench: Bench, seed: int) -> Run:
    """Trains nanoGPT's recipe to its end, independent of the options for this program's model."""
    trainer = bench.build_trainer(_text(bench), RECIPE, warmup_steps=0)
    torch.manual_seed(seed)
    nanogpt = NanoGPT(bench.baselines["nanogpt"], trainer)

    def train() -> None:
        for step in range(RECIPE_STEPS):
            nanogpt.step(recipe_learning_rate(step))

    seconds = bench.time_calls(train)
    return Run(seconds, RECIPE_STEPS, nanogpt.evaluate(trainer.val_data))


def recipe_learning_rate(step: int) -> float:
    """Returns nanoGPT's learning rate: linear warm-up to 1e-3, then cosine decay to 1e-4. The first step is step 0."""
    if step < RECIPE_WARMUP:
        return 1e-3 * (step + 1) / (RECIPE_WARMUP + 1)
    progress = (step - RECIPE_WARMUP) / (RECIPE_STEPS - RECIPE_WARMUP)
    return 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * progress))


def _text(bench: Bench) -> dict[str, Any]:
    """Returns the option for main.py's text."""
    return {"data.path": read_config(bench.options).data.path}
