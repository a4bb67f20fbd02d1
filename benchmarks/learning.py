"""The cases of bench.py about learning: the loss of counting models, and the training time until a loss.

They use the text of main.py, `data.path`, because its content matters to them.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.baselines import NanoGPT
from benchmarks.counting import kneser_ney
from benchmarks.harness import Bench, Row, SkippedError, median_row, suppress_stdout, to_options
from char_dataset import train_val_split
from mingpt.config_parser import read_config
from mingpt.corpus import encode_corpus
from mingpt.evaluation import evaluate
from mingpt.utils.errors import UserError

ORDERS = (3, 5, 7)
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
RECIPE_STEPS, RECIPE_WARMUP = 2000, 100
# The lengths of our runs: short ones whose learning rate has decayed when they reach the loss of tiny shakespeare.
STEPS_TO_RECIPES_LOSS = 320
LOSS, STEPS_TO_LOSS = 1.6, 1500


def counting(bench: Bench) -> Iterator[Row]:
    """Validation loss of n-gram models."""
    config, cache = read_config(bench.options), bench.folder / "counting"
    try:
        with suppress_stdout():
            corpus = encode_corpus(config.data.path, cache)
        train, val = train_val_split(corpus, config.data)
    except UserError as error:
        raise SkippedError(str(error)) from error
    for order in ORDERS:
        loss = -np.log(kneser_ney(train, val, order, len(corpus.vocabulary))).mean()
        yield Row(f"validation loss of a {order}-gram model, per character", float(loss), unit="nats")


class Run(NamedTuple):
    """Seconds of training, without evaluation; steps, and the loss on the whole validation text after them."""

    seconds: float
    steps: int
    loss: float


def time_to_loss(bench: Bench) -> Iterator[Row]:
    """Training seconds to the loss at which nanoGPT's recipe for CPUs ends, in nanoGPT's."""
    bench.require_cpu("it compares with nanoGPT's recipe for CPUs")
    seeds = range(1, 1 + min(REPETITIONS, bench.pairs))
    ours = [train_to_loss(bench, seed, STEPS_TO_LOSS, LOSS) for seed in seeds]
    what = f"absolute: training seconds to validation loss {LOSS:g} ({_describe(ours)})"
    yield _row(what, ours, [LOSS for _ in ours], [run.seconds for run in ours], "s")

    folder, ours, theirs = bench.require_folder(bench.nanogpt), [], []
    for seed in seeds:
        theirs.append(train_recipe(bench, folder, seed))
        ours.append(train_to_loss(bench, seed, STEPS_TO_RECIPES_LOSS, theirs[-1].loss))
    what = "our training seconds to the loss of nanoGPT's recipe for CPUs, in those of the recipe"
    what = f"{what} (ours: {_describe(ours)}; the recipe: {_describe(theirs)})"
    ratios = [mine.seconds / other.seconds for mine, other in zip(ours, theirs, strict=True)]
    yield _row(what, ours, [run.loss for run in theirs], ratios, most=0.2)


def train_to_loss(bench: Bench, seed: int, steps: int, target: float) -> Run:
    """Trains as main.py does until the validation loss is `target`, or to the last step; evaluates ten times or so."""
    defaults = {"trainer.max_steps": steps, "trainer.eval_every": max(1, steps // 10)}
    trainer = bench.build_trainer(_text_options(bench, defaults), {"trainer.seed": seed}, warmup_steps=0)
    seconds, loss, cfg = 0.0, math.inf, trainer.config.trainer
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
    losses, steps = ", ".join(f"{run.loss:.3f}" for run in runs), ", ".join(f"{run.steps:,}" for run in runs)
    return f"losses {losses} after {steps} steps"


def _row(
    what: str, ours: Sequence[Run], targets: Sequence[float], values: Sequence[float], unit: str = "", **goal: float
) -> Row:
    reached = sum(run.loss <= target for run, target in zip(ours, targets, strict=True))
    if reached == len(ours):
        return median_row(what, values, unit, **goal)
    return Row(what, f"not reached by {len(ours) - reached} of {len(ours)} runs", unit=unit, **goal)
