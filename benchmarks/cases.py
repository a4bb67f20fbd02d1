"""The cases of bench.py: each yields rows, and the first line of its docstring labels its row if it is skipped."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import NanoGPT, Step, fetch_batches, minimal_loop, tutorial_fetch, tutorial_step
from benchmarks.cluster_model import flops_per_step
from benchmarks.harness import (
    LARGE,
    MEDIUM,
    ROOT,
    SMALL,
    Bench,
    Row,
    Shape,
    median_row,
    suppress_stdout,
    synchronize,
)
from benchmarks.learning import counting, time_to_loss
from benchmarks.pipeline_timeline import steps
from benchmarks.survive import survive
from mingpt.config import MAX_STEPS
from mingpt.config_parser import read_config
from mingpt.corpus import encode_corpus
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext
from mingpt.generation import generate
from mingpt.parallel.strategy import DTYPES
from mingpt.snapshot.storage import load_snapshot
from mingpt.utils.device import has_bf16
from mingpt.utils.metrics import MetricsLogger
from mingpt.utils.signals import SignalHandler
from model import GPT
from trainer import Trainer


def actual_shape(trainer: Trainer) -> Shape:
    """The shape of a trainer, which options of the command line may have changed."""
    config = trainer.model_config
    return Shape(config.n_layer, config.n_head, config.n_embd, config.block_size, trainer.config.trainer.batch_size)


def training_loop(bench: Bench) -> Iterator[Row]:
    """A bare loop's step with the same mathematics, in whole steps of Trainer.train()."""
    interval, pairs = 50, 2 * bench.pairs
    # The last step, which evaluates and saves, comes after the last pair.
    overrides: dict[str, Any] = {"trainer.max_steps": interval * (pairs + 1) + 1, "trainer.log_every": 10}
    overrides |= {"trainer.eval_every": MAX_STEPS, "trainer.sample_every": "null", "trainer.save_every": MAX_STEPS}
    trainer = bench.build_trainer(overrides=overrides, warmup_steps=0)
    loop, ratios = minimal_loop(trainer), list[float]()
    began = time.perf_counter()

    def after_step() -> None:
        nonlocal began
        if trainer.step % interval == 0:
            synchronize(bench.context.device)
            seconds = time.perf_counter() - began
            ratios.append(bench.time_calls(loop, interval) / seconds)
            began = time.perf_counter()

    trainer.metrics = MetricsLogger(trainer.run_dir, trainer.step, trainer.last_step)
    with suppress_stdout(), closing(trainer.metrics), SignalHandler() as signals:
        if status := trainer.train_loop(signals, after_step):
            sys.exit(status)  # stopped by a signal
    what = "a bare loop's step in a step of `Trainer.train`, log_every 10"
    yield median_row(what, ratios[1:], least=0.98)  # without the pair in which both warm up


def nanogpt(bench: Bench) -> Iterator[Row]:
    """nanoGPT's step, in steps of ours."""
    what, goals = "nanoGPT's step in ours", bench.goals.nanogpt
    yield from _compare_baseline(bench, what, bench.nanogpt, lambda *args: NanoGPT(*args).step, goals)


def tutorial(bench: Bench) -> Iterator[Row]:
    """The minGPT-DDP tutorial's step, in steps of ours."""
    what = "the tutorial's step in ours"
    yield from _compare_baseline(bench, what, bench.tutorial, tutorial_step, bench.goals.tutorial)


def _compare_baseline(
    bench: Bench,
    what: str,
    folder: Path | None,
    build_step: Callable[[Path, Trainer], Step],
    goals: tuple[float | None, ...],
) -> Iterator[Row]:
    folder, options = bench.require_folder(folder), bench.goals.options
    if options:
        bench.require_compiler()
    for shape, goal in zip((SMALL, MEDIUM, LARGE), goals, strict=True):
        same = ("--model.architecture", "gpt2", *options, *shape.options)  # as the baselines
        trainer = bench.build_trainer(same, {"optimizer.name": "adamw"})
        how = f"{trainer.config.model.architecture}, {trainer.numerics.precision}, AdamW"
        how += ", compiled" if trainer.config.trainer.compile else ""
        ratios = bench.ratio(build_step(folder, trainer), trainer.train_step)
        yield median_row(f"{what} ({how}), {actual_shape(trainer)}", ratios, least=goal)


def peak(bench: Bench) -> Iterator[Row]:
    """A step's floating-point operations per second, in those of a product of two 2048 x 2048 matrices."""
    bench.require_cpu("its goals and sizes are a CPU's; `python selftest.py --only speed` has a GPU's utilization")
    for precision, goal in (("fp32", 0.8), ("bf16", 0.65)):
        what = f"a step's operations a second in those of one product, {precision}"
        if precision == "bf16" and not has_bf16(bench.context.device)[0]:
            yield Row(what, "skipped: no bf16 hardware", least=goal)
            continue
        trainer = bench.build_trainer(LARGE.options, {"trainer.precision": precision, "optimizer.name": "adamw"})
        a, b = (torch.randn(2048, 2048, dtype=DTYPES[precision]) for _ in range(2))
        ratios = bench.ratio(partial(torch.mm, a, b), trainer.train_step)
        flops = flops_per_step(trainer.model_config, trainer.config.trainer.batch_size)
        utilization = [flops / (2 * 2048**3) * ratio for ratio in ratios]
        yield median_row(f"{what}, {actual_shape(trainer)}", utilization, "%", least=goal)


def ranks(bench: Bench) -> Iterator[Row]:
    """What two ranks of one thread do in the time that one rank of two threads takes."""
    bench.require_cpu("it compares ranks with threads of a CPU")
    threads = bench.context.world_size
    if threads == 1:
        yield from bench.run_on_ranks("ranks")
        return
    for shape in (SMALL, MEDIUM):
        overrides = {"optimizer.name": "adamw"}  # with ddp, each rank would repeat all of Muon's work
        together = bench.build_trainer(shape.options, overrides | {"trainer.threads": 1})
        alone = bench.build_trainer(
            shape.options, overrides | {"trainer.threads": threads}, DistributedContext(RankInfo())
        )

        def one_rank(trainer: Trainer = alone) -> None:
            if bench.context.rank == 0:
                torch.set_num_threads(threads)
                trainer.train_step()

        def all_ranks(trainer: Trainer = together) -> None:
            torch.set_num_threads(1)
            trainer.train_step()

        what = f"tokens a second of {threads} ranks of 1 thread in those of 1 rank of {threads}, {actual_shape(alone)}"
        ratios = bench.ratio(one_rank, all_ranks, before=lambda: bench.context.all_gather_object(None))
        yield median_row(what, ratios, least=1.0)


def fetch(bench: Bench) -> Iterator[Row]:
    """What fetching a batch takes, of a step and beside the tutorial's way."""
    trainer = bench.build_trainer()
    ratios = bench.ratio(fetch_batches(trainer), trainer.train_step)
    yield median_row("to fetch a batch, of a step", ratios, "%", most=0.005)
    folder = bench.require_folder(bench.tutorial)
    for shape in (SMALL, replace(SMALL, B=512)):
        trainer = bench.build_trainer(shape.options, warmup_steps=0)
        what = f"the tutorial's way to fetch a batch of {trainer.config.trainer.batch_size} in ours"
        ratios = bench.ratio(tutorial_fetch(folder, trainer, bench.text), fetch_batches(trainer))
        yield median_row(what, ratios, least=50)


def encoding(bench: Bench) -> Iterator[Row]:
    """A dictionary's loop over a text, in the time of encode_corpus."""
    larger = bench.folder / "larger.txt"
    larger.write_text(20 * bench.text.read_text())
    for file in (bench.text, larger):

        def loop(file: Path = file) -> None:
            text = file.read_text()
            tokens = {character: token for token, character in enumerate(sorted(set(text)))}
            np.array([tokens[character] for character in text], dtype=np.uint16)

        def encode(file: Path = file) -> None:
            with suppress_stdout():
                encode_corpus(str(file), Path(tempfile.mkdtemp(dir=bench.folder)))

        megabytes = file.stat().st_size / 1e6
        what = f"a dictionary's loop over {megabytes:.0f} MB of text in encode_corpus, its file included"
        yield median_row(what, bench.ratio(loop, encode), least=20)


FIRST_STEP = r"""
import re, sys, time, torch
from pathlib import Path
began = time.perf_counter()
from mingpt.config_parser import read_config
from mingpt.distributed.process_group import init_distributed
from mingpt.parallel.build import strategy_class
from mingpt.utils.logging import configure_logging
from trainer import Trainer
configure_logging()
config = read_config(sys.argv[1:])
with init_distributed(config.distributed, needs_process_group=strategy_class(config).needs_process_group) as context:
    context.init_device(config.distributed.backend)
    Trainer(config, context).train_step()
    if context.device.type != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - began
    status = Path("/proc/self/status")  # getrusage would include pages of mapped files, which Linux may reclaim
    private = re.search(r"RssAnon:\s+(\d+)", status.read_text())[1] if status.exists() else "nan"
    print(seconds, float(private) / 1024)
"""


def start(bench: Bench) -> Iterator[Row]:
    """Seconds from PyTorch's own import to the end of the first step, text encoded; absolute."""
    what = "absolute: from `import torch` done to the first step done, 1 MB of text encoded"
    options = [bench.run_options(overrides={"trainer.compile": "false"}) for _ in range(min(3, bench.pairs))]
    yield median_row(what, [measure_first_step(each)[0] for each in options], "s", most=3)


def measure_first_step(options: Sequence[str]) -> tuple[float, float]:
    """Measures the first step of a new process.

    Returns:
        seconds from the end of `import torch` to the end of the step, and MiB of memory that is not mapped from files
    """
    command = [sys.executable, "-c", FIRST_STEP, *options]
    process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S603
    seconds, private = map(float, process.stdout.split()[-2:])
    return seconds, private


def snapshots(bench: Bench) -> Iterator[Row]:
    """What a snapshot costs."""
    trainer = bench.build_trainer()
    size = f"{sum(tensor.nbytes for tensor in snapshot_tensors(trainer)) / 1e6:.0f} MB"
    stalls = [ratio for _ in range(5) for ratio in stall_ratios(bench, trainer)]
    yield median_row(f"what a snapshot holds the step, in plain copies of its {size}", stalls, most=1.5)

    def train() -> None:
        for _ in range(100):
            trainer.train_step()

    def save_and_train() -> None:
        trainer.save_snapshot(None, is_last=False)
        train()

    ratios = bench.ratio(save_and_train, train, before=trainer.snapshots.writer.wait, times=1)
    yield median_row("what save_every 100 adds to a step", [ratio - 1 for ratio in ratios], "%", most=0.01)
    what = f"a snapshot's load with its digest checked in torch.load's of the same {size}"
    yield median_row(what, load_ratios(bench, trainer), most=1.2)


def snapshot_tensors(trainer: Trainer) -> list[Tensor]:
    """The tensors of a snapshot: parameters and optimizer state."""
    state = trainer.strategy.local_optimizer.state.values()
    return [*trainer.strategy.parameters.values(), *(tensor for tensors in state for tensor in tensors.values())]


def stall_ratios(bench: Bench, trainer: Trainer) -> list[float]:
    """Time for which saving a snapshot blocks training, relative to a copy of its tensors."""
    tensors = snapshot_tensors(trainer)
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(copies, tensors, strict=True):
            target.data.copy_(tensor, non_blocking=tensor.is_cuda)

    def step() -> None:  # so that neither action finds the tensors in the CPU's cache because of the other
        trainer.snapshots.writer.wait()
        trainer.train_step()

    return bench.ratio(lambda: trainer.save_snapshot(None, is_last=False), copy, before=step, times=1)


def load_ratios(bench: Bench, trainer: Trainer) -> list[float]:
    """Time to load and verify a snapshot, relative to torch.load."""
    trainer.save_snapshot(None, is_last=False)
    trainer.snapshots.writer.wait()
    file = trainer.snapshots.storage.file(trainer.step)
    return bench.ratio(lambda: load_snapshot(file), lambda: torch.load(file, weights_only=True))


def strategies(bench: Bench) -> Iterator[Row]:
    """A step of each strategy, in steps with DDP."""
    for strategy in ("zero1", "zero2", "fsdp"):
        yield _compare_steps(bench, "strategy", "ddp", strategy, {})
    if bench.context.world_size == 1:
        yield from bench.run_on_ranks("strategies")


def reduction(bench: Bench) -> Iterator[Row]:
    """A step whose bits are the same at every number of ranks, in steps with DDP."""
    overrides: dict[str, Any] = {"trainer.micro_batch_size": 3, "trainer.threads": 1}
    if bench.context.device.type == "cuda":  # which the tree requires there
        overrides["trainer.deterministic"] = "true"
    yield _compare_steps(bench, "reduction", "fast", "tree", overrides)
    if bench.context.world_size == 1:
        yield from bench.run_on_ranks("reduction")


def _compare_steps(bench: Bench, key: str, reference: str, value: str, overrides: dict[str, Any]) -> Row:
    first, second = (
        bench.build_trainer(overrides=overrides | {f"distributed.{key}": each}) for each in (reference, value)
    )
    number = "1 rank" if bench.context.world_size == 1 else f"{bench.context.world_size} ranks"
    ratios = bench.ratio(second.train_step, first.train_step)
    return median_row(f"a step with {key} {value} in one with {reference}, {number}", ratios)


def pipeline(bench: Bench) -> Iterator[Row]:
    """How long a pipeline's stages wait, beside (S - 1) / (M + S - 1), and what a step of them takes."""
    bench.require_cpu("the profiler's spans of a stage's work are those of the CPU, which does not wait for a GPU")
    stages = bench.context.world_size
    if stages == 1:
        yield from bench.run_on_ranks("pipeline")
        return
    B = read_config(bench.run_options(MEDIUM.options)).trainer.batch_size
    ddp = {"trainer.threads": 1, "trainer.micro_batch_size": max(1, B // 4)}
    for schedule in ("1f1b", "gpipe"):
        pipelined = ddp | {"distributed.pipeline_stages": stages, "distributed.pipeline_schedule": schedule}
        profiled = {"trainer.max_steps": 32, "trainer.profile_steps": 20}
        trainer = bench.build_trainer(MEDIUM.options, pipelined | profiled, warmup_steps=0)
        with suppress_stdout():
            trainer.train()
        folders = bench.context.all_gather_object(str(trainer.run_dir))
        recorded = steps([Path(folder, f"trace-{rank}.json") for rank, folder in enumerate(folders)])
        what = f"how long {stages} stages wait ({schedule}) in (S - 1) / (M + S - 1), {actual_shape(trainer)}"
        yield median_row(what, [step.bubble / step.ideal_bubble for step in recorded], most=1.2)
        first, second = (bench.build_trainer(MEDIUM.options, overrides) for overrides in (pipelined, ddp))
        what = f"a step of {stages} stages ({schedule}) in one with ddp on as many ranks, {actual_shape(trainer)}"
        yield median_row(what, bench.ratio(first.train_step, second.train_step))


def compile_blocks(bench: Bench) -> Iterator[Row]:
    """What trainer.compile brings, and costs."""
    bench.require_compiler()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=bench.folder)
    torch.compiler.reset()
    eager, compiled = bench.build_trainer(), bench.build_trainer(overrides={"trainer.compile": "true"}, warmup_steps=0)
    compile_seconds = bench.time_calls(compiled.train_step)
    ratios = bench.ratio(eager.train_step, compiled.train_step)
    yield median_row("a step without trainer.compile in one with it", ratios)
    yield median_row("absolute: the first compiled step, nothing cached", [compile_seconds], "s")
    gain = bench.time_calls(eager.train_step, 50) / 50 * (1 - 1 / float(np.median(ratios)))
    what = "steps after which trainer.compile has paid"
    yield median_row(what, [compile_seconds / gain], "steps") if gain > 0 else Row(what, "never")


def optimizer(bench: Bench) -> Iterator[Row]:
    """A step with Muon, in steps with AdamW."""
    adamw, muon = (bench.build_trainer(overrides={"optimizer.name": name}) for name in ("adamw", "muon"))
    yield median_row("a step with muon in one with adamw", bench.ratio(muon.train_step, adamw.train_step))


def sampling(bench: Bench) -> Iterator[Row]:
    """What the cache of keys and values brings to sampling."""
    prompt = torch.zeros(1, dtype=torch.long, device=bench.context.device)
    for shape in (replace(SMALL, T=256), replace(MEDIUM, T=256)):
        model = bench.build_trainer(shape.options, warmup_steps=0).strategy.full_model.eval()
        T = model.config.block_size

        @torch.no_grad()
        def recomputed(model: GPT = model, T: int = T) -> None:
            text = prompt[None]
            while text.size(1) < T:
                new = torch.multinomial(model(text)[0][:, -1].softmax(-1), 1)
                text = torch.cat((text, new), 1)

        def cached(model: GPT = model, T: int = T) -> None:
            for _ in generate(model, [prompt], T - 1):
                pass

        size = f"{model.config.n_layer} layers {model.config.n_embd} wide"
        what = f"{T} characters recomputed, in those with the cache, {size}"
        yield median_row(what, bench.ratio(recomputed, cached), least=5)


CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "trainer": training_loop,
    "nanogpt": nanogpt,
    "tutorial": tutorial,
    "peak": peak,
    "ranks": ranks,
    "fetch": fetch,
    "encoding": encoding,
    "start": start,
    "snapshots": snapshots,
    "strategies": strategies,
    "reduction": reduction,
    "survive": survive,
    "pipeline": pipeline,
    "compile": compile_blocks,
    "optimizer": optimizer,
    "sampling": sampling,
    "counting": counting,
    "time_to_loss": time_to_loss,
}
MULTI_RANK_CASES = ("ranks", "strategies", "reduction", "survive", "pipeline")  # others measure a single process
LONG_CASES = ("time_to_loss",)  # run only if they are named
# Case -> the option it needs.
BASELINE_OPTIONS = {"nanogpt": "nanogpt", "tutorial": "tutorial", "fetch": "tutorial", "time_to_loss": "nanogpt"}
