"""What does the cost do as the work grows? Ratios measured here, drawn, and beside what scaling.py's arithmetic says.

    python growth.py --out docs
    python growth.py shapes ranks

writes growth.md and growth.png into that folder (ten minutes; 22 GB of disk for the largest text), or prints only the
panels that are named.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cases import first_step, loads, stalls, tensors_of
from benchmarks.cluster_model import NUMBERS, SHAPES, TOKENS, Machine, flops_per_step, muon_flops, plan, tables
from benchmarks.harness import SMALL, Bench, Shape, cores, from_ranks, machine
from mingpt.config import GPTConfig
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext, init_distributed
from mingpt.utils.device import tune_malloc


@dataclass(frozen=True)
class Point:
    """One ratio.

    Args:
        panel: what grows
        x: to what
        curve: what is measured
        figure, smallest, largest: of its pairs
        prediction: by the arithmetic, if it has a say
    """

    panel: str
    x: float
    curve: str
    figure: float
    smallest: float
    largest: float
    prediction: float | None = None


def point(panel: str, x: float, curve: str, ratios: Sequence[float]) -> Point:
    """The median of these ratios."""
    return Point(panel, x, curve, statistics.median(ratios), min(ratios), max(ratios))


WIDTHS, DEPTHS, BATCHES = (64, 256, 512), (1, 2, 8, 16), (3, 6, 24, 48, 96)
SHAPES_HERE = {
    "width": [(width, replace(SMALL, width=width)) for width in WIDTHS],
    "depth": [(layers, replace(SMALL, layers=layers)) for layers in DEPTHS],
    "batch": [(B, replace(SMALL, B=B)) for B in BATCHES],
}
MEGABYTES = (10, 100, 1_000, 10_000)
STATES = (48, 128, 512, 1024, 1856)  # widths whose weights and moments are 1 MB to 2 GB
ONE_THREAD = {"trainer.threads": 1}


def measure_shapes(bench: Bench) -> Iterator[Point]:
    """A step of another width, depth or batch, in steps of the default one; one thread."""
    base = bench.trainer(SMALL.words, ONE_THREAD)
    for panel, shapes in SHAPES_HERE.items():
        for x, shape in shapes:
            made = bench.trainer(shape.words, ONE_THREAD)
            yield point(panel, x, "step", bench.ratio(made.train_step, base.train_step))


def text(bench: Bench, sizes: Sequence[int] = MEGABYTES) -> Iterator[Point]:
    """From `import torch` to the first step with longer texts, encoded before, in that with 1 MB; and memory."""
    words = {}
    for size in (1, *sizes):
        if shutil.disk_usage(bench.folder).free < 2.2e6 * size:
            print(f"text of {size:,} MB: skipped, there is too little disk for it and its tokens", file=sys.stderr)
            continue
        folder = Path(tempfile.mkdtemp(dir=bench.folder))
        with (folder / "text.txt").open("wb") as out:
            for _ in range(size):
                out.write(bench.text.read_bytes())
        words[size] = bench.options(keys={"data.path": folder / "text.txt", "trainer.run_dir": folder / "run"})
        first_step(words[size])  # encodes it
        if size == 1:
            continue
        pairs = [[first_step(words[which]) for which in (size, 1)] for _ in range(bench.pairs)]
        yield point("text", size, "seconds to the first step", [one[0] / other[0] for one, other in pairs])
        yield point("text", size, "memory of its own at the first step", [one[1] / other[1] for one, other in pairs])
        shutil.rmtree(folder)


def snapshots(bench: Bench, widths: Sequence[int] = STATES) -> Iterator[Point]:
    """What a snapshot holds the step, in plain copies of its tensors; and its load, in torch.load's."""
    for width in widths:
        words = Shape(4, 4, width, 64, 1).words
        made = bench.trainer(words, {"optimizer.name": "adamw"})
        megabytes = round(sum(tensor.nbytes for tensor in tensors_of(made)) / 1e6, 1)
        yield point("snapshots", megabytes, "stall, in plain copies", stalls(bench, made))
        yield point("snapshots", megabytes, "load, in torch.load's", loads(bench, made))
        shutil.rmtree(made.run_dir)


def measure_ranks(bench: Bench) -> Iterator[Point]:
    """Run by torchrun: a step of all these ranks, and all-reduces, in steps of one alone, one thread each."""
    together = bench.trainer(SMALL.words, ONE_THREAD)
    alone = bench.trainer(SMALL.words, ONE_THREAD, DistributedContext(RankInfo()))

    def lone() -> None:
        if bench.context.rank == 0:
            alone.train_step()

    measure = partial(bench.ratio, other=lone, before=lambda: bench.context.all_gather_object(None))
    yield point("ranks", bench.context.world_size, "step", measure(together.train_step))
    for megabytes in (0.001, 4, 40):
        numbers = torch.zeros(int(megabytes * 1e6) // 4)
        yield point("all-reduce", megabytes, str(bench.context.world_size), measure(partial(dist.all_reduce, numbers)))


def ranks(bench: Bench) -> Iterator[Point]:
    """A step of 2, 3 and 4 ranks, in steps of one."""
    for number in (2, 3, 4):
        yield from (Point(**found) for found in from_ranks(number, 1, "-m", "benchmarks.growth", "measure_ranks"))


def fitted(points: Sequence[Point]) -> Machine:
    """This machine as scaling.py sees one: a rank's thread for a GPU, and a default step of one thread for a second.

    Operations, elementwise work, blocks and a constant explain the steps of all shapes; least squares, relative errors.
    """
    rows, found = [], []
    cases = [(1.0, SMALL)] + [
        (p.figure, dict(SHAPES_HERE[p.panel])[int(p.x)]) for p in points if p.panel in SHAPES_HERE
    ]
    for figure, shape in cases:
        config = gpt(shape)
        done = flops_per_step(config, shape.B) + muon_flops(config)
        rows.append([done / 1e9, shape.layers * shape.B * shape.T * shape.width / 1e6, shape.layers, 1.0])
        found.append(figure)
    weights = 1 / np.array(found)
    (gigaflop, million, block, step), *_ = np.linalg.lstsq(
        np.array(rows) * weights[:, None], np.ones(len(found)), rcond=None
    )
    return Machine(
        "here", 1e9 / gigaflop, share=1.0, elementwise=million / 1e6, block=block, step=step, hides=0.0, reads=1e30
    )


def gpt(shape: Shape) -> GPTConfig:
    """The model of a shape."""
    return GPTConfig(shape.layers, shape.heads, shape.width, vocab_size=65, block_size=shape.T)


def with_predictions(points: Sequence[Point]) -> Iterator[Point]:
    """The same points, with what the arithmetic says of those that are steps."""
    here = fitted(points)
    for p in points:
        if p.panel not in (*SHAPES_HERE, "ranks"):
            yield p
            continue
        shape, number = dict(SHAPES_HERE.get(p.panel, ())).get(int(p.x), SMALL), 1
        rank = here
        if p.panel == "ranks":
            number = int(p.x)
            sends = sorted((q.x, q.figure) for q in points if (q.panel, q.curve) == ("all-reduce", str(number)))
            (_, latency), (small, fast), (large, slow) = sends
            shared = min(1.0, cores() / number)  # more ranks than cores
            rank = replace(
                here,
                flops=here.flops * shared,
                elementwise=here.elementwise / shared,
                block=here.block / shared,
                step=here.step / shared,
                inside=2 * (large - small) * 1e6 * (number - 1) / number / (slow - fast),
                latency=latency / (2 * math.log2(number)),
            )
        config = read_config([*shape.words, "--trainer.save_every", "1000000000"])
        yield replace(p, prediction=plan(config, gpt(shape), number, rank).step)


PANELS: dict[str, Callable[[Bench], Iterator[Point]]] = {
    "shapes": measure_shapes,
    "ranks": ranks,
    "text": text,
    "snapshots": snapshots,
}
TITLES = {
    "text": ("MB of text, encoded", "in those with 1 MB"),
    "width": ("n_embd (4 layers)", "steps of width 128"),
    "depth": ("n_layer (128 wide)", "steps of 4 layers"),
    "batch": ("batch_size", "steps of batch 12"),
    "ranks": (f"ranks of one thread, {cores()} cores", "steps of one rank"),
    "snapshots": ("MB of weights and moments", "ratio"),
}


def draw(points: Sequence[Point], file: Path) -> None:
    """Each panel's curves, both axes logarithmic; what the arithmetic says is dashed."""
    import matplotlib as mpl  # noqa: PLC0415 - only where something is drawn

    mpl.use("Agg")
    from matplotlib import pyplot, ticker  # noqa: PLC0415

    figure, places = pyplot.subplots(2, 3, figsize=(12, 7), layout="constrained")
    for place, (panel, (x, y)) in zip(places.flat, TITLES.items(), strict=True):
        mine = [p for p in points if p.panel == panel]
        for curve in dict.fromkeys(p.curve for p in mine):
            known = sorted((p for p in mine if p.curve == curve), key=lambda p: p.x)
            errors = [[p.figure - p.smallest for p in known], [p.largest - p.figure for p in known]]
            place.errorbar([p.x for p in known], [p.figure for p in known], errors, marker="o", capsize=3, label=curve)
            if known[0].prediction is not None:
                place.plot([p.x for p in known], [p.prediction for p in known], "k--", label="arithmetic")
        place.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
        if mine:
            place.legend()
            low, high = place.get_ylim()
            place.set_ylim(min(low, 0.5), max(high, 2.0))
        place.xaxis.set(
            major_locator=ticker.FixedLocator(sorted({p.x for p in mine})), minor_locator=ticker.NullLocator()
        )
        place.yaxis.set(major_locator=ticker.LogLocator(subs=(1, 2, 5)), minor_locator=ticker.NullLocator())
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    figure.suptitle(machine())
    figure.savefig(file, dpi=100)


def table(points: Sequence[Point]) -> Iterator[str]:
    """Markdown, line by line."""
    yield "| what grows | to | what | ratio | smallest to largest | arithmetic |"
    yield "|" + " --- |" * 6
    for p in points:
        told = "" if p.prediction is None else f"{p.prediction:.3g}"
        yield f"| {p.panel} | {p.x:,g} | {p.curve} | {p.figure:.3g} | {p.smallest:.3g} to {p.largest:.3g} | {told} |"


INTRODUCTION = """# What the cost does as the work grows

Written by `python growth.py --out docs`. Ratios of two things that ran in turn on this machine, medians of all pairs.
"Arithmetic" is what `scaling.py` says of the same steps: one model of the time of a step, with four figures fitted to
the panels of width, depth and batch (operations a second, elementwise work, what a block and what a step take however
small they are) and two measured (how fast gloo sends, and how long its shortest message takes), from which it foretells
the panel of ranks. Steps are in the default mode, with one thread for each rank.

![what the cost does as the work grows](growth.png)
"""
ON_PAPER = """
## On 8, 64 and 1,024 GPUs, on paper

`python scaling.py`: the same arithmetic with published figures, for {tokens:,} tokens in a step and the default
optimizer, Muon with AdamW. **No GPU was used**; that a step reaches half of the data sheet's operations a second is
assumed. "Of linear" is against products alone, spread evenly. The pick is the fastest way that fits into memory; its
micro-batch is per GPU. `--optimizer.name adamw`, other models and numbers of GPUs are options.
"""


def document(points: Sequence[Point]) -> Iterator[str]:
    """growth.md, line by line."""
    here = fitted(points)
    yield INTRODUCTION
    yield f"## {machine()}\n"
    yield from table(points)
    for kind, panels in (("fitted", tuple(SHAPES_HERE)), ("foretold", ("ranks",))):
        off = [abs(p.prediction / p.figure - 1) for p in points if p.panel in panels and p.prediction is not None]
        if off:
            middle, worst = statistics.median(off), max(off)
            yield f"\nOff by {middle:.0%} in the median of {len(off)} {kind} steps, by {worst:.0%} at most."
    touched = here.elementwise * SMALL.B * SMALL.T * SMALL.width * SMALL.layers
    yield (
        f"\nOf a default step of one thread, elementwise work is {touched:.0%}; what blocks and steps take, however "
        f"small they are, {here.block * SMALL.layers:.0%} and {here.step:.0%}; the rest are products."
    )
    yield ON_PAPER.format(tokens=TOKENS)
    yield from tables(read_config([]), SHAPES, NUMBERS)


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("panels", nargs="*", metavar="PANEL", help=f"{', '.join(PANELS)}; default: all")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where growth.md and growth.png are written")
    parser.add_argument("--json", action="store_true", help="print an object for each point")
    asked = parser.parse_args()
    known = PANELS | {"of_ranks": measure_ranks}
    for panel in asked.panels:
        if panel not in known:
            parser.error(f"there is no panel {panel}; there are: {', '.join(PANELS)}")
    if asked.out and asked.panels:
        parser.error("--out is about all panels: name none")
    if asked.out and not asked.out.is_dir():
        parser.error(f"--out: there is no folder {asked.out}")
    tune_malloc()
    points = []
    with tempfile.TemporaryDirectory() as folder, init_distributed(read_config([]).distributed) as context:
        bench = Bench(context, Path(folder), pairs=5, patience=0.3)
        for panel in asked.panels or PANELS:
            for found in known[panel](bench):
                points.append(found)
                if asked.json and context.rank == 0:
                    print(json.dumps(asdict(found)), flush=True)
                elif context.rank == 0:
                    print(found, file=sys.stderr, flush=True)
    if asked.json:
        return
    if "shapes" in (asked.panels or PANELS):
        points = [*with_predictions(points)]
    if asked.out is None:
        print("\n".join(table(points)))
        return
    draw(points, asked.out / "growth.png")
    (asked.out / "growth.md").write_text("\n".join(document(points)))


if __name__ == "__main__":
    main()
