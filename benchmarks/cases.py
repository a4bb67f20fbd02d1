"""The cases of `python -m benchmarks`. Each one yields rows of the table."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.baselines import NanoGPT, Step, minimal_loop, tutorial_step
from benchmarks.collectives import collectives
from benchmarks.harness import MEDIUM, SMALL, Bench, Row, median_row, suppress_stdout
from benchmarks.learning import time_to_loss
from mingpt.config.schema import MAX_STEPS
from mingpt.parallel.strategy import DTYPES
from mingpt.run.wait_policy import passive_wait_policy
from mingpt.system.device import device_kind
from mingpt.system.threads import available_cores
from model import GPT
from trainer import Trainer

# Options of whole runs. Only their last step evaluates and saves, and it is not measured.
ONLY_STEPS = {
    "trainer.eval_every": MAX_STEPS,
    "trainer.sample_every": "null",
    "trainer.save_every": MAX_STEPS,
    "trainer.save_overhead": "null",
}
TREE: dict[str, Any] = {"distributed.reduction": "tree", "trainer.micro_batch_size": 3, "trainer.threads": 1}
ADAMW = {"optimizer.name": "adamw"}
SAVING_SECONDS = 3.0  # a small model is saved several times within this time


def describe_shape(trainer: Trainer) -> str:
    """Returns the sizes of model and batch, which the command line may have changed."""
    config = trainer.model_config
    batch_size = trainer.config.trainer.batch_size
    return f"{config.n_layer} layers {config.n_embd} wide, T {config.block_size}, batch {batch_size}"


def training_loop(bench: Bench) -> Iterator[Row]:
    """Compares a bare loop of the same model with `Trainer.advance`."""
    interval = 50
    pairs = 2 * bench.pairs
    overrides = ONLY_STEPS | {"trainer.max_steps": interval * (pairs + 1) + 1, "trainer.log_every": 10}
    trainer = bench.build_trainer(overrides=overrides, warmup_steps=0)
    loop = minimal_loop(trainer)
    ratios = []
    with suppress_stdout():
        trainer.start_log()
        for _ in range(pairs + 1):
            trainer_seconds = bench.time_calls(trainer.advance, interval)
            loop_seconds = bench.time_calls(loop, interval)
            ratios.append(loop_seconds / trainer_seconds)
        trainer.close()
    what = "step time: bare loop / `Trainer.advance`, log_every 10"
    yield median_row(what, ratios[1:])  # both warm up in the first pair


def nanogpt(bench: Bench) -> Iterator[Row]:
    """Compares nanoGPT's step with this program's."""
    for shape in (SMALL, MEDIUM):
        trainer = bench.build_trainer(shape | {"model.architecture": "gpt2", "model.bias": "false"}, ADAMW)
        step = NanoGPT(bench.baselines["nanogpt"], trainer).step
        yield _baseline_row(bench, "nanoGPT", step, trainer)


def tutorial(bench: Bench) -> Iterator[Row]:
    """Compares the step of the minGPT-DDP tutorial with this program's."""
    for shape in (SMALL, MEDIUM):
        trainer = bench.build_trainer(shape | {"model.architecture": "gpt2"}, ADAMW)
        step = tutorial_step(bench.baselines["tutorial"], trainer)
        yield _baseline_row(bench, "the tutorial", step, trainer)


def _baseline_row(bench: Bench, name: str, step: Step, trainer: Trainer) -> Row:
    how = f"{trainer.config.model.architecture}, {trainer.numerics.precision}, AdamW"
    if trainer.config.trainer.compile:
        how += ", compiled"
    what = f"step time: {name} / this program ({how}), {describe_shape(trainer)}"
    return median_row(what, bench.ratio(step, trainer.train_step))


def snapshots(bench: Bench) -> Iterator[Row]:
    """Compares steps with and without frequent snapshots."""
    trainer = bench.build_trainer(overrides=ONLY_STEPS | {"trainer.max_steps": MAX_STEPS})
    interval = trainer.snapshots.interval
    ratios = []
    with suppress_stdout():
        trainer.start_log()
        seconds = bench.time_calls(trainer.advance, 50) / 50
        steps = max(1, round(SAVING_SECONDS / seconds))
        for _ in range(2 * bench.pairs):
            interval.overhead = 0.02
            saving_seconds = bench.time_calls(trainer.advance, steps)
            interval.overhead = None
            ratios.append(saving_seconds / bench.time_calls(trainer.advance, steps))
        trainer.close()
    yield median_row("step time: save_overhead 0.02 / null", ratios)


def contention(bench: Bench) -> Iterator[Row]:
    """Compares threads that spin, threads that sleep and a single thread while other programs use the cores."""
    trainer = bench.build_trainer(overrides={"trainer.threads": len(available_cores())})
    threads = torch.get_num_threads()

    def spinning() -> None:
        for _ in range(10):
            trainer.train_step()

    def sleeping() -> None:
        with passive_wait_policy():
            spinning()

    def single() -> None:
        torch.set_num_threads(1)
        spinning()
        torch.set_num_threads(threads)

    for programs in (0, 1, 2):
        with busy_programs(programs):
            for others, step in ((f"{threads} sleeping threads", sleeping), ("1 thread", single)):
                what = f"step time: {threads} spinning threads / {others}, {programs} busy programs"
                yield median_row(what, bench.ratio(spinning, step))


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Keeps `count` processes busy while its block runs."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]  # noqa: S603
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def strategies(bench: Bench) -> Iterator[Row]:
    """Compares a step of each strategy with DDP's."""
    for name in ("zero1", "zero2", "fsdp"):
        what = f"step time: {name} / ddp, {bench.context.world_size} ranks"
        yield _step_row(bench, what, {"distributed.strategy": name}, {"distributed.strategy": "ddp"})


def reduction(bench: Bench) -> Iterator[Row]:
    """Compares a step that has the same bits on any number of ranks with DDP's."""
    tree = TREE | {"trainer.deterministic": bench.is_on_gpu}  # required on GPUs
    what = f"step time: reduction tree / fast, {bench.context.world_size} ranks"
    yield _step_row(bench, what, tree, tree | {"distributed.reduction": "fast"})


def pipeline(bench: Bench) -> Iterator[Row]:
    """Compares a step of pipeline stages with DDP's on the same number of ranks."""
    stages = bench.context.world_size
    ddp = MEDIUM | {"trainer.threads": 1, "trainer.micro_batch_size": 4}
    reference = bench.build_trainer(ddp)
    trainer = bench.build_trainer(ddp, {"distributed.pipeline_stages": stages})
    what = f"step time: {stages} stages / ddp on {stages} ranks, {describe_shape(trainer)}"
    yield median_row(what, bench.ratio(trainer.train_step, reference.train_step))


def compile_model(bench: Bench) -> Iterator[Row]:
    """Compares a step without and with trainer.compile."""
    yield _step_row(bench, "step time: without / with trainer.compile", {}, {"trainer.compile": "true"})


def optimizer(bench: Bench) -> Iterator[Row]:
    """Compares a step with Muon and with AdamW."""
    what = "step time: muon / adamw"
    yield _step_row(bench, what, {"optimizer.name": "muon"}, ADAMW)


def _step_row(bench: Bench, what: str, overrides: Mapping[str, Any], of_reference: Mapping[str, Any]) -> Row:
    reference = bench.build_trainer(overrides=of_reference)
    trainer = bench.build_trainer(overrides=overrides)
    return median_row(what, bench.ratio(trainer.train_step, reference.train_step))


def sampling(bench: Bench) -> Iterator[Row]:
    """Compares sampling with and without the KV cache."""
    for shape in (SMALL, MEDIUM):
        yield _sampling_row(bench, shape)


def _sampling_row(bench: Bench, shape: dict[str, int]) -> Row:
    trainer = bench.build_trainer(shape | {"data.block_size": 256}, warmup_steps=0)
    model = GPT(trainer.model_config).to(bench.context.device).eval()
    T = model.config.block_size
    prompt = torch.zeros(1, dtype=torch.long, device=bench.context.device)

    def recomputed() -> None:
        text = prompt[None]
        while text.size(1) < T:
            logits, _ = model(text)
            new = torch.multinomial(logits[:, -1].softmax(-1), 1)
            text = torch.cat((text, new), 1)

    def cached() -> None:
        for _ in model.generate(prompt[None], T - 1):
            pass

    size = f"{model.config.n_layer} layers {model.config.n_embd} wide"
    with torch.inference_mode():  # like sample.py
        ratios = bench.ratio(recomputed, cached)
    return median_row(f"time of {T} sampled characters: without / with the KV cache, {size}", ratios)


def speed(bench: Bench) -> Iterator[Row]:
    """Compares the FLOP/s of a step with a matrix product's (MFU)."""
    trainer = bench.build_trainer()
    precision = trainer.numerics.precision
    how = f"{precision}, {describe_shape(trainer)}"
    batch_size = trainer.config.trainer.batch_size
    size = 8192 if bench.is_on_gpu else 1024
    matrix = torch.randn(size, size, dtype=DTYPES[precision], device=bench.context.device)
    ratios = bench.ratio(lambda: matrix @ matrix, trainer.train_step)
    products = batch_size * trainer.model_config.block_size * trainer.flops_per_token / (2 * size**3)
    what = f"MFU: FLOP/s of a step / of a {size} x {size} matrix product, {how}"
    yield median_row(what, [100 * products * ratio for ratio in ratios], "%")
    if bench.is_on_gpu:
        seconds = bench.time_calls(trainer.train_step, 50) / 50
        what = f"tokens per second on {device_kind(bench.context.device)}, {how}"
        yield Row(what, batch_size * trainer.model_config.block_size / seconds)


CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "trainer": training_loop,
    "nanogpt": nanogpt,
    "tutorial": tutorial,
    "snapshots": snapshots,
    "contention": contention,
    "strategies": strategies,
    "reduction": reduction,
    "pipeline": pipeline,
    "compile": compile_model,
    "optimizer": optimizer,
    "sampling": sampling,
    "speed": speed,
    "collectives": collectives,
    "time_to_loss": time_to_loss,
}
MULTI_RANK_CASES = ("strategies", "reduction", "pipeline", "collectives")
LONG_CASES = ("collectives", "time_to_loss")  # run only if named
BASELINES = {"nanogpt": "nanogpt", "tutorial": "tutorial", "time_to_loss": "nanogpt"}  # case -> its project
