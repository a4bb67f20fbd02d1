"""Plots loss, learning rate and speed of runs from their metrics.jsonl, into a file and on the terminal.

    python plot.py runs/default
    python plot.py runs/default runs/other --out both.png

Restarts are dotted lines, labeled where the number of ranks changes.
"""

import argparse
import math
import os
import shutil
import sys
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
from mingpt.monitoring.run_log import iter_metrics
from mingpt.program import run_program

# Colors of the runs: names in matplotlib, and the nearest of a terminal's 256 colors
COLORS = {"tab:blue": 33, "tab:orange": 208, "tab:green": 34, "tab:red": 160, "tab:purple": 135, "tab:brown": 130}
PANELS = {
    "loss": "loss, nats per character",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}
MAX_POINTS = 4000  # per curve: two in each quarter of a pixel
EVENTS = dict.fromkeys(PANELS, "train") | {"val_loss": "eval"}  # event of each value in metrics.jsonl

Curve = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Run:
    """The metrics of a run."""

    name: str  # in the plots
    curves: dict[str, Curve]  # one for each key of EVENTS
    restarts: dict[int, str]  # step -> change of the number of ranks, such as "2 → 1 ranks", or ""


def read_run(folder: Path) -> Run:
    """Reads the metrics of a run folder; raises a UserError if it is not a run folder, or does not have a loss yet."""
    file = folder / "metrics.jsonl"
    curves: dict[str, Curve] = {key: ([], []) for key in EVENTS}
    starts = []
    try:
        for row in iter_metrics(file):
            if row is None:  # the line is not a row
                continue
            if row["event"] == "start":
                starts.append(row)
            for key, event in EVENTS.items():
                value = row.get(key)
                if row["event"] == event and isinstance(value, float | int) and math.isfinite(value):
                    steps, values = curves[key]
                    steps.append(row["step"])
                    values.append(value)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"there is no {file}; name the trainer.run_dir of a run that has begun") from error
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}; make it readable, or copy it") from error
    if not curves["loss"][0]:
        raise UserError(f"{file} does not have a train row with a loss yet; trainer.log_every sets their distance")
    return Run(str(folder), {key: thin_out(*curve) for key, curve in curves.items()}, find_restarts(starts))


def thin_out(steps: list[int], values: list[float]) -> Curve:
    """Returns at most about MAX_POINTS points of a curve: its ends, and the extremes of short intervals."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    shown = {0, len(steps) - 1}
    for interval in np.array_split(np.arange(len(steps)), MAX_POINTS // 2):
        shown.add(min(interval, key=values.__getitem__))
        shown.add(max(interval, key=values.__getitem__))
    return [steps[i] for i in sorted(shown)], [values[i] for i in sorted(shown)]


def find_restarts(starts: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Returns the steps from which the run resumed, each with the change of the number of ranks.

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
    """Draws the panels into a file. Lines of earlier runs are wider, so that later lines do not hide them.

    Raises:
        UserError: the file can't be written, or its suffix is not an image format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - the import is slow, and mistakes are reported before

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
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: unknown format
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
    """Returns a plot of losses (lines) and validation losses (dots), with a summary of each run.

    Without color, lines and dots are letters: a and A for the first run, b and B for the second.

    Args:
        runs: at most len(COLORS)
        width: columns
        height: rows of the plot, without summaries
        color: whether to use color codes of terminals
    """
    import plotext  # noqa: PLC0415

    plotext.terminal.limit(False, False)  # keeps width and height without a terminal
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
    height = min(rows, 32) - len(runs) - 2  # leaves rows for the summaries and the last line
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(terminal_plot(runs, columns, max(height, 10), color))
    print(f"drawn: {out}", flush=True)


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
