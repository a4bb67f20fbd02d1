"""Plots loss, learning rate and speed of runs from their metrics.jsonl, into a file and on the terminal.

    python plot.py runs/default
    python plot.py runs/default runs/other --out both.png

Restarts are dotted lines, labeled where the number of ranks changes.
"""

import argparse
import os
import shutil
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mingpt.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import numpy as np

from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import iter_metrics
from mingpt.program import run_program

# matplotlib's name of each run's color, and the nearest of a terminal's 256 colors
COLORS = {"tab:blue": 33, "tab:orange": 208, "tab:green": 34, "tab:red": 160, "tab:purple": 135, "tab:brown": 130}
PANELS = {
    "loss": "loss, nats per character",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}
MAX_POINTS = 4000  # of a curve: two in each quarter of a pixel
EVENTS = dict.fromkeys(PANELS, "train") | {"val_loss": "eval"}  # in metrics.jsonl

Curve = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Run:
    """The metrics of a run. The name is that in the plots."""

    name: str
    curves: dict[str, Curve]  # by key of EVENTS
    restarts: dict[int, str]  # step -> the change of the number of ranks, such as "2 → 1 ranks", or ""


def read_run(folder: Path) -> Run:
    """Raises a UserError if the folder is no run folder, or has no loss yet."""
    file = folder / "metrics.jsonl"
    points = {key: (array("q"), array("d")) for key in EVENTS}  # lists would take ten times the memory
    starts = []
    others = 0
    try:
        for row in iter_metrics(file):
            if row is None:
                others += 1
                continue
            if row["event"] == "start":
                starts.append(row)
            for key, event in EVENTS.items():
                value = row.get(key)
                if row["event"] == event and isinstance(value, float | int) and abs(value) < 1e300:
                    points[key][0].append(row["step"])
                    points[key][1].append(value)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"there is no {file}; name the trainer.run_dir of a run that has begun") from error
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}; make it readable, or copy it") from error
    if others:
        logger.warning(f"{file}: lines left out, for not being rows: {others}")
    curves = {key: sort_and_thin(np.asarray(steps), np.asarray(values)) for key, (steps, values) in points.items()}
    if not curves["loss"][0]:
        raise UserError(f"{file} has no train row with a loss; the first comes after trainer.log_every steps")
    name = str(folder).encode(errors="replace").decode()  # fonts have no characters for undecodable bytes
    return Run(name, curves, find_restarts(starts))


def sort_and_thin(steps: np.ndarray, values: np.ndarray) -> Curve:
    """Sorts points by step, and of more than MAX_POINTS keeps both ends and the extremes of short intervals.

    Args:
        steps: (n,) integers
        values: (n,) floats
    """
    shown = steps.argsort(kind="stable")
    if len(shown) > MAX_POINTS:
        extremes = [0, len(shown) - 1]
        for interval in np.array_split(np.arange(len(shown)), MAX_POINTS // 2):
            part = values[shown[interval]]
            extremes += [interval[part.argmin()], interval[part.argmax()]]
        shown = shown[np.unique(extremes)]
    return steps[shown].tolist(), values[shown].tolist()


def find_restarts(starts: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Returns the steps from which the run has continued, each with its change of the number of ranks.

    Args:
        starts: the start rows
    """
    restarts: dict[int, str] = {}
    for previous, start in pairwise(sorted(starts, key=lambda row: row["step"])):
        before = previous.get("world_size")
        after = start.get("world_size")
        restarts.setdefault(start["step"], "")
        if before != after:
            restarts[start["step"]] = f"{before} → {after} ranks"
    return restarts


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draws the panels into a file. Lines of earlier runs are wider, so that equal ones do not hide them.

    Raises:
        UserError: the file can't be written, or its suffix is no image format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - importing matplotlib is slow, and mistakes come first

    figure = Figure(figsize=(9, 8), dpi=100, layout="constrained")
    axes = figure.subplots(len(PANELS), sharex=True, height_ratios=(3, 1, 1, 1))
    for ax, title in zip(axes, PANELS.values(), strict=True):
        ax.set_ylabel(title)
        ax.grid(alpha=0.25)
    width = 5.5
    for run, color in zip(runs, COLORS, strict=False):
        width -= 4 / len(runs)
        for ax, key in zip(axes, PANELS, strict=True):
            steps, values = run.curves[key]
            ax.plot(steps, values, color=color, linewidth=width, marker="." if len(steps) == 1 else "")
            for step in run.restarts:
                ax.axvline(step, color="tab:gray", linewidth=1, linestyle=":")
        axes[0].plot(*run.curves["val_loss"], "o--", color=color, linewidth=0.8, markersize=3 + width)
        for step, label in run.restarts.items():
            top = axes[0].get_xaxis_transform()
            axes[0].text(step, 0.97, label, color=color, transform=top, rotation=90, va="top")
        axes[0].plot([], [], color=color, label=f"loss of {run.name}".replace("$", r"\$"))
    axes[0].plot([], [], "o--", color="tab:gray", label="validation loss")
    axes[0].plot([], [], ":", color="tab:gray", label="step from which it resumed")
    axes[0].legend(frameon=False)
    for ax in axes[1:]:
        ax.set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    figure.align_ylabels()
    try:
        figure.savefig(file, format=file.suffix[1:] or "png")
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: the suffix is no format
        raise UserError(f"--out: {file} can't be written: {error}; name another file") from error


def summarize(run: Run) -> str:
    steps, losses = run.curves["loss"]
    summary = f"{run.name}: loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if run.curves["val_loss"][0]:
        steps, losses = run.curves["val_loss"]
        summary += f", validation loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if run.restarts:
        summary += f", resumed from (┊): {len(run.restarts)} steps"
    return summary


def terminal_plot(runs: Sequence[Run], width: int, height: int, color: bool) -> str:
    """Returns a plot of losses as lines and validation losses as dots, and a summary of each run.

    Without color they are letters: a and A for the first run, b and B for the second.

    Args:
        runs: at most len(COLORS)
        width: columns
        height: rows of the plot, without summaries
        color: whether to use the terminal's color codes
    """
    import plotext  # noqa: PLC0415

    plotext.terminal.limit(False, False)  # keeps width and height where there is no terminal
    figure = plotext.figure.clear().theme("simple").canvas("default").plot_size(width, height)
    figure.title("loss and validation loss, nats per character").label("step")
    summaries = []
    labels: dict[int, str] = {}
    all_steps: list[int] = []
    for letter, run, code in zip("abcdef", runs, COLORS.values(), strict=False):
        line = "braille" if color else letter
        dot = "●" if color else letter.upper()
        figure.draw(figure.signal(*run.curves["loss"], marker=plotext.marker(line, code)).lines())
        if run.curves["val_loss"][0]:
            figure.draw(figure.signal(*run.curves["val_loss"], marker=plotext.marker(dot, code)))
        summaries.append(plotext.colorize(f"{dot} {summarize(run)}", code).string(colorless=not color))
        labels |= {step: label or " " for step, label in run.restarts.items()}
        all_steps += [*run.curves["loss"][0], *run.restarts]
    first = min(all_steps)
    last = max(all_steps)
    ticks = np.unique(np.linspace(first, last, width // 12, dtype=int)).tolist()
    figure.ruler("x", "both").lim(first, max(last, first + 1))
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
    figure.ruler("x", "upper").ticks(list(labels), list(labels.values())).grid(True, "dotted")
    return "\n".join([figure.build().string(colorless=not color).rstrip("\n"), *summaries])


def run(argv: Sequence[str]) -> None:
    """Plots the runs that the command line names, into a file and on the terminal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (main.py's trainer.run_dir)")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="file, or folder for plot.png (default: the first run folder)"
    )
    args = parser.parse_args(argv)
    if len(args.runs) > len(COLORS):
        raise UserError(f"{len(args.runs)} runs can't be told apart; draw {len(COLORS)} at most")
    runs = [read_run(folder) for folder in args.runs]
    out = args.out or args.runs[0]
    if out.is_dir():
        out /= "plot.png"
    draw(runs, out)
    columns, rows = shutil.get_terminal_size()
    height = min(rows, 32) - len(runs) - 2  # for the summaries, and the last line
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(terminal_plot(runs, columns, max(height, 10), color))
    print(f"drawn: {out}", flush=True)


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
