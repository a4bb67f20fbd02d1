"""What is measured? Each function here yields rows; the first line of its docstring says what they are about."""

from __future__ import annotations

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

from benchmarks.baselines import Step, bare_loop, fetching, nanogpt_step, tutorial_fetch, tutorial_step
from benchmarks.cluster_model import flops_per_step
from benchmarks.harness import CPU, MIDDLE, ROOT, SMALL, WIDE, Bench, Row, Shape, row, silenced, time_calls
from benchmarks.pipeline_timeline import steps
from mingpt.config_parser import read_config
from mingpt.corpus import encode_corpus
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext
from mingpt.generation import generate
from mingpt.parallel.data_parallel import DTYPES
from mingpt.snapshot.storage import load_snapshot
from mingpt.utils.device import has_bf16
from mingpt.utils.signals import SignalHandler
from model import GPT
from trainer import Trainer


def shape_of(made: Trainer) -> Shape:
    """The shape that is measured: the command line may have asked for another one."""
    config = made.state.shape
    return Shape(config.n_layer, config.n_head, config.n_embd, config.block_size, made.config.trainer.batch_size)


def trainer(bench: Bench) -> Iterator[Row]:
    """A bare loop's step with the same mathematics, in whole steps of Trainer.fit()."""
    steps, pairs = 50, 2 * bench.pairs
    # The last step comes after the last pair: to evaluate and save is not the loop's own work.
    keys: dict[str, Any] = {"trainer.max_steps": steps * (pairs + 1) + 1, "trainer.log_every": 10}
    keys |= {"trainer.eval_every": 10**9, "trainer.sample_every": "null", "trainer.save_every": 10**9}
    made = bench.trainer(keys=keys, warm=0)
    bare, ratios = bare_loop(made), list[float]()
    began = time.perf_counter()

    def give_way() -> None:
        nonlocal began
        if made.state.step % steps == 0:
            own = time.perf_counter() - began
            ratios.append(time_calls(bare, steps) / own)
            began = time.perf_counter()

    with silenced(), closing(made._open_metrics()) as metrics, SignalHandler() as stop:
        if status := made._train(metrics, stop, give_way):  # it took the signal for itself, saved and came back
            sys.exit(status)
    yield row("a bare loop's step in a step of `Trainer.fit`, log_every 10", ratios[1:], least=0.98)  # both warm up


def nanogpt(bench: Bench) -> Iterator[Row]:
    """nanoGPT's step on a CPU, in steps of ours."""
    yield from _others(bench, "nanoGPT's step in ours", bench.nanogpt, nanogpt_step, bench.mode.nanogpt)


def tutorial(bench: Bench) -> Iterator[Row]:
    """The minGPT-DDP tutorial's step, in steps of ours."""
    yield from _others(bench, "the tutorial's step in ours", bench.tutorial, tutorial_step, bench.mode.tutorial)


def _others(
    bench: Bench, what: str, folder: Path | None, step: Callable[[Path, Trainer], Step], goals: tuple[float, ...]
) -> Iterator[Row]:
    folder = bench.needs_clone(folder)
    if bench.mode.words:
        bench.needs_compiler()
    for shape, goal in zip((SMALL, MIDDLE, WIDE), goals, strict=True):
        made = bench.trainer((*bench.mode.words, *shape.words), {"optimizer.name": "adamw"})  # as theirs
        how = f"{made.state.precision}, AdamW" + (", compiled" if made.config.trainer.compile else "")
        yield row(f"{what} ({how}), {shape_of(made)}", bench.ratio(step(folder, made), made.train_step), least=goal)


def peak(bench: Bench) -> Iterator[Row]:
    """A step's floating-point operations per second, in those of a product of two 2048 x 2048 matrices."""
    for precision, goal in (("fp32", 0.8), ("bf16", 0.65)):
        what = f"a step's operations a second in those of one product, {precision}"
        if precision == "bf16" and not has_bf16(CPU)[0]:
            yield Row(what, "skipped: no bf16 hardware", least=goal)
            continue
        made = bench.trainer(WIDE.words, {"trainer.precision": precision, "optimizer.name": "adamw"})
        one, other = (torch.randn(2048, 2048, dtype=DTYPES[precision]) for _ in range(2))
        ratios = bench.ratio(partial(torch.mm, one, other), made.train_step)
        done = flops_per_step(made.state.shape, made.config.trainer.batch_size)
        shares = [done / (2 * 2048**3) * ratio for ratio in ratios]
        yield row(f"{what}, {shape_of(made)}", shares, "%", least=goal)


def ranks(bench: Bench) -> Iterator[Row]:
    """What two ranks of one thread do in the time that one rank of two threads takes."""
    if bench.context.world_size == 1:
        yield from bench.on_ranks("ranks", 2)
        return
    threads = bench.context.world_size
    for shape in (SMALL, MIDDLE):
        keys = {"optimizer.name": "adamw"}  # ddp makes each rank do all of Muon's work
        together = bench.trainer(shape.words, keys | {"trainer.threads": 1})
        lone = bench.trainer(
            shape.words, keys | {"trainer.threads": threads}, DistributedContext(RankInfo())
        )  # only rank 0's counts

        def alone(made: Trainer = lone) -> None:
            if bench.context.rank == 0:
                torch.set_num_threads(threads)
                made.train_step()

        def all_ranks(made: Trainer = together) -> None:
            torch.set_num_threads(1)
            made.train_step()

        what = f"tokens a second of {threads} ranks of 1 thread in those of 1 rank of {threads}, {shape_of(lone)}"
        yield row(what, bench.ratio(alone, all_ranks, before=lambda: bench.context.all_gather_object(None)), least=1.0)


def fetch(bench: Bench) -> Iterator[Row]:
    """What fetching a batch takes, of a step and beside the tutorial's way."""
    made = bench.trainer()
    yield row("to fetch a batch, of a step", bench.ratio(fetching(made), made.train_step), "%", most=0.005)
    folder = bench.needs_clone(bench.tutorial)
    for shape in (SMALL, replace(SMALL, B=512)):
        made = bench.trainer(shape.words, warm=0)
        what = f"the tutorial's way to fetch a batch of {made.config.trainer.batch_size} in ours"
        yield row(what, bench.ratio(tutorial_fetch(folder, made, bench.text), fetching(made)), least=50)


def encoding(bench: Bench) -> Iterator[Row]:
    """A dictionary's loop over a text, in the time of encode_corpus."""
    larger = bench.folder / "larger.txt"
    larger.write_text(20 * bench.text.read_text())
    for file in (bench.text, larger):

        def loop(file: Path = file) -> None:
            text = file.read_text()
            tokens = {character: token for token, character in enumerate(sorted(set(text)))}
            np.array([tokens[character] for character in text], dtype=np.uint16)

        def ours(file: Path = file) -> None:
            encode_corpus(str(file), Path(tempfile.mkdtemp(dir=bench.folder)))

        what = (
            f"a dictionary's loop over {file.stat().st_size / 1e6:.0f} MB of text in encode_corpus, its file included"
        )
        yield row(what, bench.ratio(loop, ours), least=20)


FIRST_STEP = r"""
import re, sys, time, torch
from pathlib import Path
began = time.perf_counter()
from distributed import connect
from main import read_config
from trainer import Trainer
config = read_config(sys.argv[1:])
with connect(config.distributed) as world:
    Trainer(config, world)._step()
    took = time.perf_counter() - began
    status = Path("/proc/self/status")  # getrusage counts the text's pages, which Linux takes back when it likes
    own = re.search(r"RssAnon:\s+(\d+)", status.read_text())[1] if status.exists() else "nan"
    print(took, float(own) / 1024)
"""


def start(bench: Bench) -> Iterator[Row]:
    """Seconds from PyTorch's own import to the end of the first step, text encoded; absolute."""
    what = "absolute: from `import torch` done to the first step done, 1 MB of text encoded"
    keys = {"trainer.compile": "false"}
    took = [first_step(bench.options(keys=keys))[0] for _ in range(min(3, bench.pairs))]
    yield row(what, took, "s", most=3)


def first_step(words: Sequence[str]) -> tuple[float, float]:
    """Seconds from PyTorch's own import to the end of the first step of a new process, and the MiB that are its own."""
    command = [sys.executable, "-c", FIRST_STEP, *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S603
    took, own = map(float, done.stdout.split()[-2:])
    return took, own


def snapshots(bench: Bench) -> Iterator[Row]:
    """What a snapshot costs."""
    made = bench.trainer()
    state, size = made.state, f"{sum(tensor.nbytes for tensor in tensors_of(made)) / 1e6:.0f} MB"
    stalled = [ratio for _ in range(5) for ratio in stalls(bench, made)]
    yield row(f"what a snapshot holds the step, in plain copies of its {size}", stalled, most=1.5)

    def hundred() -> None:
        time_calls(made.train_step, 100)

    def hundred_and_save() -> None:
        state.save(None, last=False)
        hundred()

    costs = bench.ratio(hundred_and_save, hundred, before=state.writer.wait, times=1)
    yield row("what save_every 100 adds to a step", [ratio - 1 for ratio in costs], "%", most=0.01)
    what = f"a snapshot's load with its digest checked in torch.load's of the same {size}"
    yield row(what, loads(bench, made), most=1.2)


def tensors_of(made: Trainer) -> list[Tensor]:
    """What a snapshot holds."""
    moments = made.state.strategy.stepper.state.values()
    return [*made.state.strategy.parameters.values(), *(tensor for tensors in moments for tensor in tensors.values())]


def stalls(bench: Bench, made: Trainer) -> list[float]:
    """Seconds for which a snapshot holds the step, in those of a plain copy of its tensors."""
    tensors = tensors_of(made)
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for aside, tensor in zip(copies, tensors, strict=True):
            aside.data.copy_(tensor)

    def step() -> None:  # so that neither finds the state in the processor's cache because of the other
        made.state.writer.wait()
        made.train_step()

    return bench.ratio(lambda: made.state.save(None, last=False), copy, before=step, times=1)


def loads(bench: Bench, made: Trainer) -> list[float]:
    """Seconds in which a snapshot is read, in those of torch.load."""
    made.state.save(None, last=False)
    made.state.writer.wait()
    file = made.folder.file(made.state.step)
    return bench.ratio(lambda: load_snapshot(file), lambda: torch.load(file, weights_only=True))


def strategies(bench: Bench) -> Iterator[Row]:
    """A step of each strategy, in steps with DDP."""
    for strategy in ("zero1", "zero2", "fsdp"):
        yield _compared(bench, "strategy", "ddp", strategy, {})
    if bench.context.world_size == 1:
        yield from bench.on_ranks("strategies")


def reduction(bench: Bench) -> Iterator[Row]:
    """A step whose bits are the same at every number of ranks, in steps with DDP."""
    yield _compared(bench, "reduction", "fast", "tree", {"trainer.micro_batch_size": 3, "trainer.threads": 1})
    if bench.context.world_size == 1:
        yield from bench.on_ranks("reduction")


def _compared(bench: Bench, key: str, one: str, other: str, keys: dict[str, Any]) -> Row:
    first, second = (bench.trainer(keys=keys | {f"distributed.{key}": way}) for way in (one, other))
    number = "1 rank" if bench.context.world_size == 1 else f"{bench.context.world_size} ranks"
    return row(
        f"a step with {key} {other} in one with {one}, {number}", bench.ratio(second.train_step, first.train_step)
    )


def pipeline(bench: Bench) -> Iterator[Row]:
    """How long a pipeline's stages wait, beside (S - 1) / (M + S - 1), and what a step of them takes."""
    if bench.context.world_size == 1:
        yield from bench.on_ranks("pipeline")
        return
    stages, B = bench.context.world_size, read_config(bench.options(MIDDLE.words)).trainer.batch_size
    one_thread = {"trainer.threads": 1, "trainer.micro_batch_size": max(1, B // 4)}
    for schedule in ("1f1b", "gpipe"):
        how = one_thread | {"distributed.pipeline_stages": stages, "distributed.pipeline_schedule": schedule}
        watched = bench.trainer(MIDDLE.words, how | {"trainer.max_steps": 32, "trainer.profile_steps": 20}, warm=0)
        with silenced():
            watched.train()
        found = steps(
            [
                Path(run, f"trace-{i}.json")
                for i, run in enumerate(bench.context.all_gather_object(str(watched.run_dir)))
            ]
        )
        what = f"how long {stages} stages wait ({schedule}) in (S - 1) / (M + S - 1), {shape_of(watched)}"
        yield row(what, [step.bubble / step.least for step in found], most=1.2)
        cut, whole = bench.trainer(MIDDLE.words, how), bench.trainer(MIDDLE.words, one_thread)
        what = f"a step of {stages} stages ({schedule}) in one with ddp on as many ranks, {shape_of(watched)}"
        yield row(what, bench.ratio(cut.train_step, whole.train_step))


def compile_blocks(bench: Bench) -> Iterator[Row]:
    """What trainer.compile brings, and costs."""
    bench.needs_compiler()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=bench.folder)
    torch.compiler.reset()
    plain, compiled = bench.trainer(), bench.trainer(keys={"trainer.compile": "true"}, warm=0)
    took = time_calls(compiled.train_step)
    ratios = bench.ratio(plain.train_step, compiled.train_step)
    yield row("a step without trainer.compile in one with it", ratios)
    yield row("absolute: the first compiled step, nothing cached", [took], "s")
    one = time_calls(plain.train_step, 50) / 50
    if (gain := one * (1 - 1 / float(np.median(ratios)))) > 0:
        yield row("steps after which trainer.compile has paid", [took / gain], "steps")
    else:
        yield Row("steps after which trainer.compile has paid", "never")


def optimizer(bench: Bench) -> Iterator[Row]:
    """A step with Muon, in steps with AdamW."""
    adamw, muon = (bench.trainer(keys={"optimizer.name": name}) for name in ("adamw", "muon"))
    yield row("a step with muon in one with adamw", bench.ratio(muon.train_step, adamw.train_step))


def sampling(bench: Bench) -> Iterator[Row]:
    """What the cache of keys and values brings to sampling."""
    start = torch.zeros(1, dtype=torch.long)
    for shape in (replace(SMALL, T=256), replace(MIDDLE, T=256)):
        model = bench.trainer(shape.words, warm=0).state.strategy.whole.eval()
        T = model.config.block_size

        @torch.no_grad()
        def recomputed(model: GPT = model, T: int = T) -> None:
            text = start[None]
            while text.size(1) < T:
                new = torch.multinomial(model(text)[0][:, -1].softmax(-1), 1)
                text = torch.cat((text, new), 1)

        def cached(model: GPT = model, T: int = T) -> None:
            for _ in generate(model, [start], T - 1):
                pass

        size = f"{model.config.n_layer} layers {model.config.n_embd} wide"
        what = f"{T} characters recomputed, in those with the cache, {size}"
        yield row(what, bench.ratio(recomputed, cached), least=5)


CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "trainer": trainer,
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
    "pipeline": pipeline,
    "compile": compile_blocks,
    "optimizer": optimizer,
    "sampling": sampling,
}
BASELINE_OPTIONS = {
    "nanogpt": "nanogpt",
    "tutorial": "tutorial",
    "fetch": "tutorial",
}  # whose folder a measurement wants
MULTI_RANK_CASES = ("ranks", "strategies", "reduction", "pipeline")  # the others are about one process
