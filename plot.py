"""Plots loss, learning rate and speed of runs from their metrics.jsonl, into a file and on the terminal.

    python plot.py runs/default
    python plot.py runs/default runs/other --out both.png

Restarts are dotted lines, labeled where the number of ranks changes.
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import read_metrics
from mingpt.program import run_program

# matplotlib's name of each run's color, and the nearest of a terminal's 256 colors
COLORS = {"tab:blue": 33, "tab:orange": 208, "tab:green": 34, "tab:red": 160, "tab:purple": 135, "tab:brown": 130}
TERMINAL_GRAY = 245
DASH = 3  # columns of the terminal
PANELS = {
    "loss": "loss, nats per character",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}
EVENTS = dict.fromkeys(PANELS, "train") | {"val_loss": "eval"}  # in metrics.jsonl

Curve = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Run:
    """The metrics of a run. The name is that in the plots."""

    name: str
    curves: dict[str, Curve]  # by key of EVENTS
    restarts: dict[
        int, str
    ]  # step -> numbers of ranks before and after, such as "2 → 1 ranks"; empty if they are equal


def read_run(folder: Path) -> Run:
    """Raises a UserError if the folder is no run folder, or has no loss yet."""
    file = folder / "metrics.jsonl"
    try:
        rows, others = read_metrics(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"there is no {file}; name the trainer.run_dir of a run that has begun") from error
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}; make it readable, or copy it") from error
    if others:
        logger.warning(f"{file}: {others} line{'s' if others > 1 else ''} left out, for not being rows")
    rows.sort(key=lambda row: row["step"])
    curves = {key: select_curve(rows, event, key) for key, event in EVENTS.items()}
    if not curves["loss"][0]:
        raise UserError(f"{file} has no train row with a loss; the first comes after trainer.log_every steps")
    name = "".join(c if c.isprintable() else "\ufffd" for c in str(folder))
    return Run(name, curves, find_restarts(rows))


def select_curve(rows: Sequence[dict[str, Any]], event: str, key: str) -> Curve:
    """Returns the finite values of a key in rows of an event."""
    steps = []
    values = []
    for row in rows:
        value = row.get(key)
        if row["event"] == event and isinstance(value, float | int) and abs(value) < 1e300:
            steps.append(row["step"])
            values.append(value)
    return steps, values


def find_restarts(rows: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Returns the steps from which the run has continued, each with its change of the number of ranks."""
    starts = [row for row in rows if row["event"] == "start"]
    sizes: dict[int, list[int]] = {}
    ranks = None
    for number, start in enumerate(starts):
        if number > 0 or start["step"] > 0:
            at_step = sizes.setdefault(start["step"], [])
            if ranks and start.get("world_size") not in (None, ranks):
                at_step += [start["world_size"]] if at_step else [ranks, start["world_size"]]
        ranks = start.get("world_size")
    return {step: f"{' → '.join(map(str, ranks))} ranks" if ranks else "" for step, ranks in sizes.items()}


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draws the panels into a file. Lines of earlier runs are wider, so that equal ones do not hide them.

    Raises:
        UserError: the file can't be written, or its suffix is no image format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - importing matplotlib is slow, and mistakes come first

    figure = Figure(figsize=(9, 8), dpi=100, layout="constrained")
    axes = figure.subplots(len(PANELS), sharex=True, height_ratios=(3, 1, 1, 1))
    widths = [1.5]
    if len(runs) > 1:
        widths = np.linspace(4.0, 1.2, len(runs)).tolist()
    lines = []
    for number, (run, color, width) in enumerate(zip(runs, COLORS, widths, strict=False)):
        for ax, key in zip(axes, PANELS, strict=True):
            steps, values = run.curves[key]
            [line] = ax.plot(steps, values, color=color, linewidth=width, marker="." if len(steps) == 1 else "")
            for step in run.restarts:
                ax.axvline(step, color="tab:gray", linewidth=1, linestyle=":")
        lines.append(line)
        axes[0].plot(*run.curves["val_loss"], "o--", color=color, linewidth=0.8, markersize=3 + width)
        for step, label in run.restarts.items():
            top = axes[0].get_xaxis_transform()
            axes[0].text(step, 0.97 - 0.3 * (number % 3), label, color=color, transform=top, rotation=90, va="top")
    for ax, title in zip(axes, PANELS.values(), strict=True):
        ax.set_ylabel(title)
        ax.grid(alpha=0.25)
        ax.ticklabel_format(axis="both", style="plain", useOffset=False)
        if ax is not axes[0]:
            ax.set_ylim(bottom=0)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("step")
    lines += axes[0].plot([], [], "o--", color="tab:gray", linewidth=0.8)
    lines += axes[0].plot([], [], ":", color="tab:gray")
    names = [run.name.replace("$", r"\$") for run in runs]
    axes[0].legend(lines, [*names, "validation loss", "restart"], frameon=False)
    figure.align_ylabels()
    try:
        figure.savefig(file)
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: the suffix is no format
        raise UserError(f"--out: {file} can't be written: {error}; name another file") from error


def summarize(run: Run) -> str:
    steps, losses = run.curves["loss"]
    summary = f"{run.name}: loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if run.curves["val_loss"][0]:
        steps, losses = run.curves["val_loss"]
        summary += f", validation loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if run.restarts:
        summary += f", restarted at {len(run.restarts)} step{'s' if len(run.restarts) > 1 else ''} (┊)"
    return summary


def terminal_plot(runs: Sequence[Run], width: int, height: int, color: bool) -> str:
    """Returns a plot of losses as lines and validation losses as dots, and a summary of each run.

    Without color they are letters, small and capital. Lines of several runs are dashed in turn, so that equal ones do
    not hide each other.

    Args:
        runs: at most len(COLORS)
        width: columns
        height: rows of the plot, without summaries
        color: whether to use the terminal's color codes
    """
    import plotext  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    plotext.terminal.limit(False, False)  # keeps width and height where there is no terminal
    figure = plotext.figure.clear().theme("simple").canvas("default").plot_size(width, height)
    figure.title("loss and validation loss, nats per character").label("step")
    first = min(run.curves["loss"][0][0] for run in runs)
    last = max(run.curves["loss"][0][-1] for run in runs)
    labels: dict[int, str] = {}
    summaries = []
    for number, (run, code) in enumerate(zip(runs, COLORS.values(), strict=False)):
        letter = chr(ord("a") + number)
        line = "braille" if color else letter
        dot = "●" if color else letter.upper()
        pixel = plotext.pixel(code if color else None, "default")
        steps, losses = run.curves["loss"]
        x = np.linspace(steps[0], steps[-1], width).tolist()
        y = np.interp(x, steps, losses).tolist()
        for start in range(DASH * number, width, DASH * len(runs)):
            end = start + DASH + 1  # so that the dashes of a single run are one line
            signal = figure.signal(x[start:end], y[start:end], marker=plotext.marker(line, pixel))
            figure.draw(signal.lines())
        if run.curves["val_loss"][0]:
            figure.draw(figure.signal(*run.curves["val_loss"], marker=plotext.marker(dot, pixel)))
        labels |= run.restarts
        text = f"{'━' if color else letter}{dot} {summarize(run)}"
        for row in textwrap.wrap(text, width, subsequent_indent="   "):
            summaries.append(plotext.colorize(row, pixel).string(colorless=not color))
    figure.ruler("x", "both").lim(min([first, *labels]), max([last, *labels]) + (first == last)).frequency(0)
    ticks = [tick for tick in MaxNLocator(width // 12, integer=True).tick_values(first, last) if first <= tick <= last]
    figure.ruler("x").ticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    ruler = figure.ruler("x", "upper").ticks(list(labels), list(labels.values()))
    ruler.grid(True, "dotted", plotext.pixel(TERMINAL_GRAY if color else None, "default"))
    return "\n".join([figure.build().string(colorless=not color).rstrip("\n"), *summaries])


def run(argv: Sequence[str]) -> None:
    """Plots the runs that the command line names, into a file and on the terminal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (main.py's trainer.run_dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: plot.png in the first run folder)")
    args = parser.parse_args(argv)
    if len(args.runs) > len(COLORS):
        raise UserError(f"{len(args.runs)} runs can't be told apart; draw {len(COLORS)} at most")
    runs = [read_run(folder) for folder in args.runs]
    out = args.out or args.runs[0] / "plot.png"
    draw(runs, out)
    columns, rows = shutil.get_terminal_size()
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(terminal_plot(runs, max(columns, 20), max(10, min(rows - 2 * len(runs) - 2, 30)), color))
    print(f"drawn: {out}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run_program(run, sys.argv[1:]))
