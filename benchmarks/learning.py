"""The case time_to_loss: the training time until a loss.

It uses the text of main.py, `data.path`, because its content matters.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.baselines import NanoGPT
from benchmarks.harness import Bench, Row, median_row, to_options
from mingpt.config_parser import read_config
from mingpt.evaluation import evaluate

REPETITIONS = 3  # with the seeds 1, 2 and 3
# nanoGPT's README: train_shakespeare_char.py on a CPU.
RECIPE = {
    "data.block_size": 64,
    "model.n_layer": 4,
    "model.n_head": 4,
    "model.n_embd": 128,
    "model.dropout": 0.0,
    "trainer.batch_size": 12,
}
RECIPE_STEPS = 2000
RECIPE_WARMUP = 100
# The lengths of our runs: short ones whose learning rate has decayed when they reach the loss of tiny shakespeare.
STEPS_TO_RECIPES_LOSS = 320
LOSS = 1.6
STEPS_TO_LOSS = 1500


class Run(NamedTuple):
    """Seconds of training, without evaluation; steps, and the loss on the whole validation text after them."""

    seconds: float
    steps: int
    loss: float


def time_to_loss(bench: Bench) -> Iterator[Row]:
    """Training seconds to the loss at which nanoGPT's recipe for CPUs ends, in nanoGPT's."""
    seeds = range(1, 1 + min(REPETITIONS, bench.pairs))
    ours = [train_to_loss(bench, seed, STEPS_TO_LOSS, LOSS) for seed in seeds]
    what = f"absolute: training seconds to validation loss {LOSS:g} ({_describe(ours)})"
    yield _row(what, ours, [LOSS for _ in ours], [run.seconds for run in ours], "s")

    folder = bench.require_folder(bench.nanogpt)
    ours = []
    theirs = []
    for seed in seeds:
        theirs.append(train_recipe(bench, folder, seed))
        ours.append(train_to_loss(bench, seed, STEPS_TO_RECIPES_LOSS, theirs[-1].loss))
    what = "our training seconds to the loss of nanoGPT's recipe for CPUs, in those of the recipe"
    what = f"{what} (ours: {_describe(ours)}; the recipe: {_describe(theirs)})"
    ratios = [mine.seconds / other.seconds for mine, other in zip(ours, theirs, strict=True)]
    yield _row(what, ours, [run.loss for run in theirs], ratios)


def train_to_loss(bench: Bench, seed: int, steps: int, target: float) -> Run:
    """Trains as main.py does until the validation loss is `target`, or to the last step; evaluates ten times or so."""
    defaults = {"trainer.max_steps": steps, "trainer.eval_every": max(1, steps // 10)}
    trainer = bench.build_trainer(_text_options(bench, defaults), {"trainer.seed": seed}, warmup_steps=0)
    cfg = trainer.config.trainer
    seconds = 0.0
    loss = math.inf
    while trainer.step < trainer.last_step and loss > target:
        seconds += bench.time_calls(trainer.train_step, min(cfg.eval_every, trainer.last_step - trainer.step))
        loss = evaluate(trainer.strategy, trainer.val_data, cfg.micro_batch_size or cfg.batch_size)
    return Run(seconds, trainer.step, loss)


def train_recipe(bench: Bench, folder: Path, seed: int) -> Run:
    """Trains nanoGPT's recipe to its end, whatever the options for our model are."""
    trainer = bench.build_trainer(_text_options(bench), RECIPE, warmup_steps=0)
    torch.manual_seed(seed)
    nanogpt = NanoGPT(folder, trainer)

    def train() -> None:
        for step in range(RECIPE_STEPS):
            nanogpt.step(recipe_learning_rate(step))

    seconds = bench.time_calls(train)
    return Run(seconds, RECIPE_STEPS, nanogpt.evaluate(trainer.val_data))


def recipe_learning_rate(step: int) -> float:
    """nanoGPT's schedule: linear warm-up to 1e-3 and cosine decay to 1e-4; the first step is step 0."""
    if step < RECIPE_WARMUP:
        return 1e-3 * (step + 1) / (RECIPE_WARMUP + 1)
    progress = (step - RECIPE_WARMUP) / (RECIPE_STEPS - RECIPE_WARMUP)
    return 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * progress))


def _text_options(bench: Bench, defaults: dict[str, Any] | None = None) -> list[str]:
    """Options of main.py that those of the command line override, with main.py's text."""
    return to_options({"data.path": read_config(bench.options).data.path, **(defaults or {})})


def _describe(runs: Sequence[Run]) -> str:
    losses = ", ".join(f"{run.loss:.3f}" for run in runs)
    steps = ", ".join(f"{run.steps:,}" for run in runs)
    return f"losses {losses} after {steps} steps"


def _row(what: str, ours: Sequence[Run], targets: Sequence[float], values: Sequence[float], unit: str = "") -> Row:
    reached = sum(run.loss <= target for run, target in zip(ours, targets, strict=True))
    if reached == len(ours):
        return median_row(what, values, unit)
    return Row(what, f"not reached by {len(ours) - reached} of {len(ours)} runs", unit=unit)
