"""Measures how costs grow with text, width, depth, batch, ranks and snapshots, and compares with cluster_model.py.

    python -m benchmarks.growth --out docs
    python -m benchmarks.growth shapes ranks

The first writes growth.md and growth.png into a folder, which takes ten minutes, and 22 GB of disk for the largest
text. The second prints some panels only.
"""

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

from benchmarks.cases import load_ratios, measure_first_step, snapshot_tensors, stall_ratios
from benchmarks.cluster_model import (
    GPU_COUNTS,
    MODELS,
    TOKENS_PER_STEP,
    Cluster,
    estimate_step,
    flops_per_step,
    muon_flops,
    tables,
)
from benchmarks.harness import SMALL, Bench, Shape, available_cores, machine_name, torchrun
from mingpt.config import MAX_STEPS, GPTConfig
from mingpt.config_parser import read_config
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext, init_distributed
from mingpt.utils.device import tune_malloc
from mingpt.utils.errors import UserError
from mingpt.utils.logging import run_script


@dataclass(frozen=True)
class Point:
    """A measured ratio.

    Args:
        panel: what grows
        x: its size
        curve: what is measured
        figure, smallest, largest: median and range of all pairs
        prediction: of the model; None where it has none
    """

    panel: str
    x: float
    curve: str
    figure: float
    smallest: float
    largest: float
    prediction: float | None = None


def median_point(panel: str, x: float, curve: str, ratios: Sequence[float]) -> Point:
    return Point(panel, x, curve, statistics.median(ratios), min(ratios), max(ratios))


SHAPES = {
    "width": [(width, replace(SMALL, width=width)) for width in (64, 256, 512)],
    "depth": [(layers, replace(SMALL, layers=layers)) for layers in (1, 2, 8, 16)],
    "batch": [(B, replace(SMALL, B=B)) for B in (3, 6, 24, 48, 96)],
}
TEXT_MEGABYTES = (10, 100, 1_000, 10_000)
SNAPSHOT_WIDTHS = (48, 128, 512, 1024, 1856)  # of models whose snapshots have 1 MB to 2 GB
RANK_COUNTS = (2, 3, 4)
MESSAGE_MEGABYTES = (0.001, 4, 40)
ONE_THREAD = {"trainer.threads": 1}


def measure_shapes(bench: Bench) -> Iterator[Point]:
    """Steps of other widths, depths and batches, relative to one of SMALL; one thread."""
    base = bench.build_trainer(SMALL.options, ONE_THREAD)
    for panel, shapes in SHAPES.items():
        for x, shape in shapes:
            trainer = bench.build_trainer(shape.options, ONE_THREAD)
            yield median_point(panel, x, "step", bench.ratio(trainer.train_step, base.train_step))


def measure_texts(bench: Bench, sizes: Sequence[int] = TEXT_MEGABYTES) -> Iterator[Point]:
    """Time and memory until the first step on an encoded text, relative to a text of 1 MB."""
    options = {}
    for size in (1, *sizes):
        if shutil.disk_usage(bench.folder).free < 2.2e6 * size:
            print(f"text of {size:,} MB: skipped, there is too little disk for it and its tokens", file=sys.stderr)
            continue
        folder = Path(tempfile.mkdtemp(dir=bench.folder))
        with (folder / "text.txt").open("wb") as file:
            for _ in range(size):
                file.write(bench.text.read_bytes())
        overrides = {"data.path": folder / "text.txt", "trainer.run_dir": folder / "run"}
        options[size] = bench.run_options(overrides=overrides | {"distributed.backend": "gloo"})  # as the other panels
        measure_first_step(options[size])  # encodes the text
        if size == 1:
            continue
        pairs = [[measure_first_step(options[each]) for each in (size, 1)] for _ in range(bench.pairs)]
        for i, curve in enumerate(("seconds to the first step", "memory of its own at the first step")):
            yield median_point("text", size, curve, [large[i] / small[i] for large, small in pairs])
        shutil.rmtree(folder)


def measure_snapshots(bench: Bench, widths: Sequence[int] = SNAPSHOT_WIDTHS) -> Iterator[Point]:
    """For how long saving blocks training, relative to a copy of the tensors, and loading, relative to torch.load."""
    for width in widths:
        trainer = bench.build_trainer(Shape(4, 4, width, 64, 1).options, {"optimizer.name": "adamw"})
        megabytes = round(sum(tensor.nbytes for tensor in snapshot_tensors(trainer)) / 1e6, 1)
        yield median_point("snapshots", megabytes, "stall, in plain copies", stall_ratios(bench, trainer))
        yield median_point("snapshots", megabytes, "load, in torch.load's", load_ratios(bench, trainer))
        shutil.rmtree(trainer.run_dir)


def measure_rank_group(bench: Bench) -> Iterator[Point]:
    """Under torchrun: a step and all-reduces of all ranks, relative to a step of one rank; one thread each."""
    together = bench.build_trainer(SMALL.options, ONE_THREAD)
    alone = bench.build_trainer(SMALL.options, ONE_THREAD, DistributedContext(RankInfo()))

    def one_rank() -> None:
        if bench.context.rank == 0:
            alone.train_step()

    ranks, barrier = bench.context.world_size, partial(bench.context.all_gather_object, None)
    yield median_point("ranks", ranks, "step", bench.ratio(together.train_step, one_rank, barrier))
    for megabytes in MESSAGE_MEGABYTES:
        tensor = torch.zeros(int(megabytes * 1e6) // 4)
        ratios = bench.ratio(partial(dist.all_reduce, tensor), one_rank, barrier)
        yield median_point("all-reduce", megabytes, str(ranks), ratios)


def measure_ranks(bench: Bench) -> Iterator[Point]:
    """Steps of several ranks, relative to a step of one."""
    for ranks in RANK_COUNTS:
        for point in torchrun(ranks, 1, "-m", "benchmarks.growth", "rank_group"):
            yield Point(**point)


PANELS: dict[str, Callable[[Bench], Iterator[Point]]] = {
    "shapes": measure_shapes,
    "ranks": measure_ranks,
    "text": measure_texts,
    "snapshots": measure_snapshots,
}


def gpt_config(shape: Shape) -> GPTConfig:
    return GPTConfig(n_layer=shape.layers, n_head=shape.heads, n_embd=shape.width, vocab_size=65, block_size=shape.T)


def fit_cluster(points: Sequence[Point]) -> Cluster:
    """This machine as a cluster of one-thread ranks, with time in units of a step of SMALL.

    Least squares of relative errors determine speed of products, elementwise time, and time per block and per step.
    """
    coefficients, times = [], []
    cases = [(point.figure, dict(SHAPES[point.panel])[int(point.x)]) for point in points if point.panel in SHAPES]
    for figure, shape in [(1.0, SMALL), *cases]:
        config = gpt_config(shape)
        flops = flops_per_step(config, shape.B) + muon_flops(config)
        elements = shape.layers * shape.B * shape.T * shape.width
        coefficients.append([flops / 1e9, elements / 1e6, shape.layers, 1.0])
        times.append(figure)
    relative = np.array(coefficients) / np.array(times)[:, None]
    (gigaflop, million_elements, block, step), *_ = np.linalg.lstsq(relative, np.ones(len(times)), rcond=None)
    return Cluster(
        "this machine",
        flops=1e9 / gigaflop,
        utilization=1.0,
        elementwise_seconds=million_elements / 1e6,
        block_seconds=block,
        step_seconds=step,
        overlap=0.0,
        memory_bandwidth=1e30,  # the fit includes it
    )


def fit_ranks(cluster: Cluster, points: Sequence[Point], ranks: int) -> Cluster:
    """The same with bandwidth and latency of all-reduces of so many ranks, which share this machine's cores."""
    messages = sorted(
        (point.x, point.figure) for point in points if (point.panel, point.curve) == ("all-reduce", str(ranks))
    )
    (_, latency), (small, small_time), (large, large_time) = messages
    cores_per_rank = min(1.0, available_cores() / ranks)
    return replace(
        cluster,
        flops=cluster.flops * cores_per_rank,
        elementwise_seconds=cluster.elementwise_seconds / cores_per_rank,
        block_seconds=cluster.block_seconds / cores_per_rank,
        step_seconds=cluster.step_seconds / cores_per_rank,
        intra_node_bandwidth=2 * (large - small) * 1e6 * (ranks - 1) / ranks / (large_time - small_time),
        latency=latency / (2 * math.log2(ranks)),
    )


def predict(points: Sequence[Point]) -> list[Point]:
    """Adds the model's predictions to the points that are steps."""
    cluster = fit_cluster(points)

    def prediction(point: Point) -> float | None:
        if point.panel not in (*SHAPES, "ranks"):
            return None
        shape, ranks, rank = SMALL, 1, cluster
        if point.panel == "ranks":
            ranks = int(point.x)
            rank = fit_ranks(cluster, points, ranks)
        else:
            shape = dict(SHAPES[point.panel])[int(point.x)]
        config = read_config([*shape.options, "--trainer.save_every", str(MAX_STEPS)])
        return estimate_step(config, gpt_config(shape), ranks, rank).seconds

    return [replace(point, prediction=prediction(point)) for point in points]


AXES = {  # panel -> labels of its axes
    "text": ("MB of text, encoded", "relative to 1 MB"),
    "width": ("n_embd (4 layers)", "relative to a step of width 128"),
    "depth": ("n_layer (128 wide)", "relative to a step of 4 layers"),
    "batch": ("batch_size", "relative to a step of batch 12"),
    "ranks": (f"ranks of one thread, {available_cores()} cores", "relative to a step of one rank"),
    "snapshots": ("MB of weights and optimizer state", "ratio"),
}


def draw(points: Sequence[Point], file: Path) -> None:
    """Draws the curves of each panel on logarithmic axes, with predictions as dashed lines."""
    import matplotlib as mpl  # noqa: PLC0415 - takes long

    mpl.use("Agg")
    from matplotlib import pyplot, ticker  # noqa: PLC0415

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 7), layout="constrained")
    for ax, (panel, (x_label, y_label)) in zip(axes.flat, AXES.items(), strict=True):
        shown = sorted((point for point in points if point.panel == panel), key=lambda point: point.x)
        for name in dict.fromkeys(point.curve for point in shown):
            curve = [point for point in shown if point.curve == name]
            x, y = [point.x for point in curve], [point.figure for point in curve]
            errors = [[p.figure - p.smallest for p in curve], [p.largest - p.figure for p in curve]]
            ax.errorbar(x, y, errors, marker="o", capsize=3, label=name)
            if curve[0].prediction is not None:
                ax.plot(x, [point.prediction for point in curve], "k--", label="predicted")
        ax.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
        if shown:
            ax.legend()
            low, high = ax.get_ylim()
            ax.set_ylim(min(low, 0.5), max(high, 2.0))
        ticks = sorted({point.x for point in shown})
        ax.xaxis.set(major_locator=ticker.FixedLocator(ticks), minor_locator=ticker.NullLocator())
        ax.yaxis.set(major_locator=ticker.LogLocator(subs=(1, 2, 5)), minor_locator=ticker.NullLocator())
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    figure.suptitle(machine_name())
    figure.savefig(file, dpi=100)


def table(points: Sequence[Point]) -> Iterator[str]:
    """A Markdown table, line by line."""
    yield "| what grows | to | what | ratio | smallest to largest | predicted |"
    yield "|" + " --- |" * 6
    for p in points:
        prediction = "" if p.prediction is None else f"{p.prediction:.3g}"
        spread = f"{p.smallest:.3g} to {p.largest:.3g}"
        yield f"| {p.panel} | {p.x:,g} | {p.curve} | {p.figure:.3g} | {spread} | {prediction} |"


INTRODUCTION = """# How costs grow

Written by `python -m benchmarks.growth --out docs`. Each ratio is the median of pairs of measurements that alternate
between two things on this machine. Steps run in the default mode, with one thread per rank. "Predicted" is what the
model of [cluster_model.py](../benchmarks/cluster_model.py) says of the same steps. Four of its parameters are fitted to
the panels of width, depth and batch: operations per second, time per element of activations, and constant times per
block and per step. Two are measured, gloo's bandwidth and its latency; with them it predicts the panel of ranks.

![How costs grow](growth.png)
"""
CLUSTERS_INTRODUCTION = """
## Predictions for 8, 64 and 1,024 GPUs

`python -m benchmarks.cluster_model`: the same model with published figures, for {tokens:,} tokens per step and the
default optimizer, Muon with AdamW. **No GPU was used**, and that matrix products reach half of the data sheet's
operations per second is an assumption. "Of linear" is relative to the products alone, divided evenly among GPUs. The
pick is the fastest configuration that fits into memory; its micro-batch is per GPU. `--optimizer.name adamw`, other
models and other numbers of GPUs are options.
"""


def document(points: Sequence[Point]) -> Iterator[str]:
    """The content of growth.md, line by line, from points with predictions."""
    yield INTRODUCTION
    yield f"## {machine_name()}\n"
    yield from table(points)
    for kind, panels in (("fitted", tuple(SHAPES)), ("predicted", ("ranks",))):
        errors = [abs(p.prediction / p.figure - 1) for p in points if p.panel in panels and p.prediction is not None]
        if errors:
            median, worst = statistics.median(errors), max(errors)
            yield f"\nThe median error of {len(errors)} {kind} steps is {median:.0%}, the largest {worst:.0%}."
    cluster = fit_cluster(points)
    elementwise = cluster.elementwise_seconds * SMALL.B * SMALL.T * SMALL.width * SMALL.layers
    blocks = cluster.block_seconds * SMALL.layers
    yield (
        f"\nOf a default step with one thread, elementwise operations take {elementwise:.0%}, constant times per block "
        f"and per step {blocks:.0%} and {cluster.step_seconds:.0%}, and matrix products the rest."
    )
    yield CLUSTERS_INTRODUCTION.format(tokens=TOKENS_PER_STEP)
    yield from tables(read_config([]), MODELS, GPU_COUNTS)


def run(argv: Sequence[str]) -> None:
    """Measures the panels that the command line names.

    Raises:
        UserError: there is no such panel or folder.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("panels", nargs="*", metavar="PANEL", help=f"{', '.join(PANELS)}; default: all")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for growth.md and growth.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object per point")
    args = parser.parse_args(argv)
    measurements = PANELS | {"rank_group": measure_rank_group}
    for panel in args.panels:
        if panel not in measurements:
            raise UserError(f"there is no panel {panel}; there are: {', '.join(PANELS)}")
    if args.out and args.panels:
        raise UserError("--out is about all panels: name none")
    if args.out and not args.out.is_dir():
        raise UserError(f"--out: there is no folder {args.out}")
    tune_malloc()
    panels, points = args.panels or list(PANELS), []
    with tempfile.TemporaryDirectory() as folder, init_distributed(read_config([]).distributed) as context:
        bench = Bench(context, Path(folder), pairs=5, min_run_time=0.3)
        for panel in panels:
            for point in measurements[panel](bench):
                points.append(point)
                if context.rank == 0:
                    print(
                        json.dumps(asdict(point)) if args.json else point, file=sys.stdout if args.json else sys.stderr
                    )
                    sys.stdout.flush()
    if args.json:
        return
    if "shapes" in panels:
        points = predict(points)
    if args.out is None:
        print("\n".join(table(points)))
        return
    draw(points, args.out / "growth.png")
    (args.out / "growth.md").write_text("\n".join(document(points)))


if __name__ == "__main__":
    sys.exit(run_script(run))
