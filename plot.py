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
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.utils.errors import UserError
from mingpt.utils.logging import logger, run_script
from mingpt.utils.metrics import read_metrics

# matplotlib's name of each run's color, and the nearest of a terminal's 256 colors
COLORS = {"tab:blue": 33, "tab:orange": 208, "tab:green": 34, "tab:red": 160, "tab:purple": 135, "tab:brown": 130}
COLORS |= {"tab:pink": 212, "tab:olive": 142, "tab:cyan": 38}
GRAY, TERMINAL_GRAY = "tab:gray", 245
PANELS = {"loss": "loss, nats per character", "learning_rate": "learning rate", "grad_norm": "gradient norm"}
PANELS |= {"tokens_per_second": "tokens/s"}
EVENTS = dict.fromkeys(PANELS, "train") | {"val_loss": "eval"}  # in metrics.jsonl
DASH_COLUMNS = 3

Curve = tuple[list[float], list[float]]  # steps and values


@dataclass(frozen=True)
class Run:
    """The metrics of a run. The name is that in the plots."""

    name: str
    curves: dict[str, Curve]  # by key of EVENTS
    restarts: dict[int, list[int]]  # step -> numbers of ranks before and after, if they differ


def select_curve(rows: Sequence[dict[str, Any]], event: str, key: str) -> Curve:
    """Returns the finite values of a key in rows of an event."""
    pairs = [(row["step"], row.get(key)) for row in rows if row["event"] == event]
    finite = [(step, value) for step, value in pairs if isinstance(value, float | int) and abs(value) < 1e300]
    return [step for step, _ in finite], [value for _, value in finite]


def find_restarts(rows: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    starts = [(row["step"], row.get("world_size")) for row in rows if row["event"] == "start"]
    restarts: dict[int, list[int]] = {step: [] for step, _ in starts[:1] if step > 0}
    for (_, before), (step, after) in pairwise(starts):
        sizes = restarts.setdefault(step, [])
        if before and after and before != after:
            sizes += [after] if sizes else [before, after]
    return restarts


def restart_label(sizes: Sequence[int]) -> str:
    return f"{' → '.join(map(str, sizes))} ranks"


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest end of each path that no other has; unprintable characters are replaced."""
    names = []
    for path in folders:
        n = next(n for n in count(1) if sum(other.parts[-n:] == path.parts[-n:] for other in folders) == 1)
        names.append("".join(c if c.isprintable() else "\ufffd" for c in str(Path(*path.parts[-n:]))))
    return names


def read_run(folder: Path, name: str) -> Run:
    """Raises a UserError if the folder is no run folder, or has no loss yet."""
    file = folder / "metrics.jsonl"
    if not os.path.isfile(file):
        above = [parent for parent in folder.parents if os.path.isfile(parent / "metrics.jsonl")]
        below = []
        with suppress(OSError):  # such as a name that is too long, or a folder that may not be read
            below = sorted(other.parent for other in folder.glob("*/metrics.jsonl"))
        near = " ".join(map(str, above[:1] or below))
        hint = f"did you mean {near}?" if near else "main.py writes one into trainer.run_dir when training begins"
        raise UserError(f"there is no metrics.jsonl in {folder}, so it is no run folder; {hint}")
    try:
        rows, others = read_metrics(file)
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}; make it readable, or copy it") from error
    if others:
        logger.warning(f"{file}: {others} line{'s' * (others > 1)} left out, for not being rows")
    rows.sort(key=lambda row: row["step"])
    run = Run(name, {key: select_curve(rows, event, key) for key, event in EVENTS.items()}, find_restarts(rows))
    if not run.curves["loss"][0]:
        raise UserError(f"{file} has no train row with a loss; the first comes after trainer.log_every steps")
    return run


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draws the panels into a file. Lines of earlier runs are wider, so that equal ones do not hide them.

    Raises:
        UserError: the file can't be written, or its suffix is no image format.
    """
    from matplotlib import ticker  # noqa: PLC0415 - importing matplotlib is slow, and mistakes come first
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.lines import Line2D  # noqa: PLC0415

    figure = Figure(figsize=(9, 8), dpi=100, layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise UserError(f"--out: {file} must end with one of .{', .'.join(formats)}")
    axes = figure.subplots(len(PANELS), sharex=True, height_ratios=(3, 1, 1, 1))
    widths = np.linspace(4.0, 1.2, len(runs)) if len(runs) > 1 else [1.5]
    labeled = [run for run in runs if any(run.restarts.values())]
    position = {"xycoords": ("data", "axes fraction"), "xytext": (3, 0), "textcoords": "offset points"}
    for run, color, width in zip(runs, COLORS, widths, strict=False):
        for ax, key in zip(axes, PANELS, strict=True):
            steps, values = run.curves[key]
            ax.plot(steps, values, color=color, linewidth=width, marker="." if len(steps) == 1 else "")
            for step in run.restarts:
                ax.axvline(step, color=GRAY, linewidth=1, linestyle=":")
        axes[0].plot(*run.curves["val_loss"], "o--", color=color, linewidth=0.8, markersize=3 + width)
        for step, sizes in run.restarts.items():
            if sizes:
                height = 0.97 - 0.3 * (labeled.index(run) % 3)
                label = axes[0].annotate(restart_label(sizes), (step, height), **position, color=color)
                label.set(rotation="vertical", verticalalignment="top")
    for ax, title in zip(axes, PANELS.values(), strict=True):
        ax.set_ylabel(title)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.10g}"))
        if ax is not axes[0]:
            ax.set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes[-1].xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    figure.align_ylabels()
    lines = [Line2D([], [], color=color, linewidth=width) for color, width in zip(COLORS, widths, strict=False)]
    lines.append(Line2D([], [], color=GRAY, marker="o", linestyle="--", linewidth=0.8))
    lines.append(Line2D([], [], color=GRAY, linestyle=":"))
    names = [*(run.name for run in runs), "validation loss", *["restart"] * any(run.restarts for run in runs)]
    columns = max(1, min(len(names), 90 // (max(map(len, names)) + 6)))
    legend = figure.legend(lines[: len(names)], names, loc="outside upper left", ncols=columns, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may hold $
    try:
        figure.savefig(file)
    except (OSError, RuntimeError) as error:  # RuntimeError: the format needs a program that is not installed
        raise UserError(f"--out: {file} can't be written: {error}; name another file") from error


def summarize(run: Run) -> str:
    steps, losses = run.curves["loss"]
    summary = f"{run.name}: loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if run.curves["val_loss"][0]:
        steps, losses = run.curves["val_loss"]
        summary += f", validation loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if restarts := len(run.restarts):
        summary += f", restarted at {restarts} step{'s' * (restarts > 1)} (┊)"
    return summary


def terminal_plot(runs: Sequence[Run], width: int, height: int, color: bool) -> str:
    """Returns a plot of losses as lines and validation losses as dots, and a summary of each run.

    Without color they are letters, small and capital. Lines of later runs are dashed, so that they do not hide equal
    ones.

    Args:
        runs: at most len(COLORS)
        width: columns, at least 20
        height: rows of the plot without summaries, at least 8
        color: whether to use the terminal's color codes
    """
    import plotext  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    def pixel(code: int) -> plotext.pixel:
        return plotext.pixel(code if color else None, "default")

    plotext.terminal.limit(False, False)  # keeps width and height where there is no terminal
    figure = plotext.figure.clear().theme("simple").canvas("default").plot_size(width, height)
    figure.title("loss and validation loss, nats per character").label("step")
    shown = [run.curves[key] for run in runs for key in ("loss", "val_loss")]
    shown += [(list(run.restarts), []) for run in runs]
    for axis, (side, ticks) in enumerate({"x": width // 12, "y": height // 4}.items()):
        numbers = [number for curve in shown for number in curve[axis]]
        margin = int(min(numbers) == max(numbers))
        low, high = min(numbers) - margin, max(numbers) + margin
        values = MaxNLocator(ticks, integer=side == "x").tick_values(low, high)
        inside = [value for value in values if low <= value <= high]
        figure.ruler(side, "both").lim(low, high).frequency(0)
        figure.ruler(side).ticks(inside, [f"{tick:,.10g}" for tick in inside])
    labels: dict[float, Any] = {}
    summaries: list[str] = []
    for i, (run, code) in enumerate(zip(runs, COLORS.values(), strict=False)):
        letter = chr(ord("a") + i)
        line, dot = ("braille", "●") if color else (letter, letter.upper())
        for step, sizes in run.restarts.items():
            labels[step] = plotext.colorize(restart_label(sizes), pixel(code)) if sizes else labels.get(step, "")
        steps, losses = run.curves["loss"]
        x = np.linspace(steps[0], steps[-1], width)
        y = np.interp(x, steps, losses)
        for start in range(DASH_COLUMNS * (i % 3), width, DASH_COLUMNS * min(len(runs), 3)) if i else [0]:
            dash = slice(start, start + DASH_COLUMNS + 1 if i else None)
            signal = figure.signal(x[dash].tolist(), y[dash].tolist(), marker=plotext.marker(line, pixel(code)))
            figure.draw(signal.lines())
        if run.curves["val_loss"][0]:
            figure.draw(figure.signal(*run.curves["val_loss"], marker=plotext.marker(dot, pixel(code))))
        summary = f"{'━' if color else letter}{dot} {summarize(run)}"
        lines = textwrap.wrap(summary, width, subsequent_indent="   ")
        summaries += [plotext.colorize(text, pixel(code)).string(colorless=not color) for text in lines]
    ruler = figure.ruler("x", "upper").ticks(list(labels), list(labels.values()))
    ruler.grid(True, "dotted", pixel(TERMINAL_GRAY))
    return "\n".join([figure.build().string(colorless=not color).rstrip("\n"), *summaries])


def run(argv: Sequence[str]) -> None:
    """Plots the runs that the command line names, into a file and on the terminal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (main.py's trainer.run_dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: plot.png in the first run folder)")
    args = parser.parse_args(argv)
    folders = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in args.runs))
    if len(folders) > len(COLORS):
        raise UserError(f"{len(folders)} runs can't be told apart; draw {len(COLORS)} at most")
    out = args.out or args.runs[0] / "plot.png"
    runs = [read_run(folder, name) for folder, name in zip(folders, unique_names(folders), strict=True)]
    draw(runs, out)
    columns, rows = shutil.get_terminal_size()
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(terminal_plot(runs, max(columns, 20), max(10, min(rows - 2 * len(runs) - 2, 30)), color))
    print(f"drawn: {out}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run_script(run))
