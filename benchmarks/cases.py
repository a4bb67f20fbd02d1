"""The cases of `python -m benchmarks`, which yield rows. The first line of a case's docstring labels a skipped one."""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines import Step, minimal_loop, nanogpt_step, tutorial_step
from benchmarks.harness import MEDIUM, SMALL, Bench, Row, Shape, median_row, suppress_stdout
from benchmarks.learning import time_to_loss
from benchmarks.survive import survive
from mingpt.config import MAX_STEPS
from mingpt.config_parser import read_config
from mingpt.generation import generate
from mingpt.signals import SignalHandler
from model import GPT
from trainer import Trainer


def actual_shape(trainer: Trainer) -> Shape:
    """The shape of a trainer, which options of the command line may have changed."""
    config = trainer.model_config
    return Shape(config.n_layer, config.n_head, config.n_embd, config.block_size, trainer.config.trainer.batch_size)


def training_loop(bench: Bench) -> Iterator[Row]:
    """A bare loop's step with the same mathematics, in whole steps of Trainer.train()."""
    interval = 50
    pairs = 2 * bench.pairs
    overrides = {
        "trainer.max_steps": interval * (pairs + 1) + 1,  # the last step, which evaluates and saves, is not measured
        "trainer.log_every": 10,
        "trainer.eval_every": MAX_STEPS,
        "trainer.sample_every": "null",
        "trainer.save_every": MAX_STEPS,
    }
    trainer = bench.build_trainer(overrides=overrides, warmup_steps=0)
    loop = minimal_loop(trainer)
    ratios = []
    with suppress_stdout(), SignalHandler() as trainer.signals:
        trainer.report.start()
        for _ in range(pairs + 1):
            trainer_seconds = bench.time_calls(trainer.advance, interval)
            loop_seconds = bench.time_calls(loop, interval)
            ratios.append(loop_seconds / trainer_seconds)
            if trainer.stop_signal:
                sys.exit(128 + trainer.stop_signal)
        trainer.close()
    what = "a bare loop's step in a step of `Trainer.train`, log_every 10"
    yield median_row(what, ratios[1:])  # without the pair in which both warm up


def nanogpt(bench: Bench) -> Iterator[Row]:
    """nanoGPT's step, in steps of ours."""
    same = ("--model.architecture", "gpt2", "--model.bias", "false")
    yield from _compare_baseline(bench, "nanoGPT's step in ours", bench.nanogpt, nanogpt_step, same)


def tutorial(bench: Bench) -> Iterator[Row]:
    """The minGPT-DDP tutorial's step, in steps of ours."""
    same = ("--model.architecture", "gpt2")
    yield from _compare_baseline(bench, "the tutorial's step in ours", bench.tutorial, tutorial_step, same)


def _compare_baseline(
    bench: Bench, what: str, folder: Path | None, build_step: Callable[[Path, Trainer], Step], same: Sequence[str]
) -> Iterator[Row]:
    """One row per shape; `same` are options that give our model the layers of the baseline."""
    folder = bench.require_folder(folder)
    for shape in (SMALL, MEDIUM):
        trainer = bench.build_trainer((*same, *shape.options), {"optimizer.name": "adamw"})
        how = f"{trainer.config.model.architecture}, {trainer.numerics.precision}, AdamW"
        if trainer.config.trainer.compile:
            how += ", compiled"
        ratios = bench.ratio(build_step(folder, trainer), trainer.train_step)
        yield median_row(f"{what} ({how}), {actual_shape(trainer)}", ratios)


def snapshots(bench: Bench) -> Iterator[Row]:
    """What snapshots cost."""
    trainer = bench.build_trainer()

    def train() -> None:
        for _ in range(100):
            trainer.train_step()

    def save_and_train() -> None:
        trainer.save_snapshot(None)
        train()

    ratios = bench.ratio(save_and_train, train, before=trainer.snapshots.writer.wait, times=1)
    yield median_row("what save_every 100 adds to a step", [ratio - 1 for ratio in ratios], "%")


def strategies(bench: Bench) -> Iterator[Row]:
    """A step of each strategy, in steps with DDP."""
    for strategy in ("zero1", "zero2", "fsdp"):
        yield _compare_steps(bench, "strategy", "ddp", strategy, {})


def reduction(bench: Bench) -> Iterator[Row]:
    """A step whose bits are the same at every number of ranks, in steps with DDP."""
    overrides: dict[str, Any] = {"trainer.micro_batch_size": 3, "trainer.threads": 1}
    if bench.context.device.type == "cuda":  # which the tree requires there
        overrides["trainer.deterministic"] = "true"
    yield _compare_steps(bench, "reduction", "fast", "tree", overrides)


def _compare_steps(bench: Bench, key: str, reference: str, value: str, overrides: dict[str, Any]) -> Row:
    first = bench.build_trainer(overrides=overrides | {f"distributed.{key}": reference})
    second = bench.build_trainer(overrides=overrides | {f"distributed.{key}": value})
    ratios = bench.ratio(second.train_step, first.train_step)
    return median_row(f"a step with {key} {value} in one with {reference}, {bench.context.world_size} ranks", ratios)


def pipeline(bench: Bench) -> Iterator[Row]:
    """A step of pipeline stages, in steps with DDP on as many ranks."""
    stages = bench.context.world_size
    batch_size = read_config(bench.run_options(MEDIUM.options)).trainer.batch_size
    ddp = {"trainer.threads": 1, "trainer.micro_batch_size": max(1, batch_size // 4)}
    reference = bench.build_trainer(MEDIUM.options, ddp)
    trainer = bench.build_trainer(MEDIUM.options, ddp | {"distributed.pipeline_stages": stages})
    what = f"a step of {stages} stages in one with ddp on as many ranks, {actual_shape(trainer)}"
    yield median_row(what, bench.ratio(trainer.train_step, reference.train_step))


def compile_model(bench: Bench) -> Iterator[Row]:
    """What trainer.compile brings, and costs."""
    bench.require_compiler()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=bench.folder)
    torch.compiler.reset()
    eager = bench.build_trainer()
    compiled = bench.build_trainer(overrides={"trainer.compile": "true"}, warmup_steps=0)
    first_seconds = bench.time_calls(compiled.train_step)
    ratios = bench.ratio(eager.train_step, compiled.train_step)
    yield median_row("a step without trainer.compile in one with it", ratios)
    gain = bench.time_calls(eager.train_step, 50) / 50 * (1 - 1 / statistics.median(ratios))
    what = "steps after which trainer.compile has paid, in a first start"
    yield Row(what, first_seconds / gain if gain > 0 else "never", unit="steps")


def optimizer(bench: Bench) -> Iterator[Row]:
    """A step with Muon, in steps with AdamW."""
    adamw = bench.build_trainer(overrides={"optimizer.name": "adamw"})
    muon = bench.build_trainer(overrides={"optimizer.name": "muon"})
    yield median_row("a step with muon in one with adamw", bench.ratio(muon.train_step, adamw.train_step))


def sampling(bench: Bench) -> Iterator[Row]:
    """What the cache of keys and values brings to sampling."""
    prompt = torch.zeros(1, dtype=torch.long, device=bench.context.device)
    for shape in (replace(SMALL, T=256), replace(MEDIUM, T=256)):
        trainer = bench.build_trainer(shape.options, warmup_steps=0)
        model = GPT(trainer.model_config).to(bench.context.device).eval()
        T = model.config.block_size

        def recomputed(model: GPT = model, T: int = T) -> None:
            text = prompt[None]
            while text.size(1) < T:
                logits, _ = model(text)
                new = torch.multinomial(logits[:, -1].softmax(-1), 1)
                text = torch.cat((text, new), 1)

        def cached(model: GPT = model, T: int = T) -> None:
            for _ in generate(model, [prompt], T - 1):
                pass

        size = f"{model.config.n_layer} layers {model.config.n_embd} wide"
        what = f"{T} characters recomputed, in those with the cache, {size}"
        with torch.inference_mode():  # as sample.py
            ratios = bench.ratio(recomputed, cached)
        yield median_row(what, ratios)


CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "trainer": training_loop,
    "nanogpt": nanogpt,
    "tutorial": tutorial,
    "snapshots": snapshots,
    "strategies": strategies,
    "reduction": reduction,
    "survive": survive,
    "pipeline": pipeline,
    "compile": compile_model,
    "optimizer": optimizer,
    "sampling": sampling,
    "time_to_loss": time_to_loss,
}
MULTI_RANK_CASES = ("strategies", "reduction", "survive", "pipeline")  # others measure a single process
CPU_CASES = {  # case -> why it is about CPUs
    "survive": "distributed.survive does not support GPUs yet",
    "time_to_loss": "it compares with nanoGPT's recipe for CPUs",
}
LONG_CASES = ("time_to_loss",)  # run only if they are named
BASELINE_OPTIONS = {"nanogpt": "nanogpt", "tutorial": "tutorial", "time_to_loss": "nanogpt"}  # case -> option it needs
