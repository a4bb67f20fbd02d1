"""What happened in these runs? Loss, learning rate and speed over steps, from metrics.jsonl alone: PNG and terminal.

    python plot.py runs/default
    python plot.py runs/default runs/other --out both.png

Restarts are dotted lines, and the number of ranks is told where it changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.utils.errors import UserError
from mingpt.utils.metrics import read_metrics
from mingpt.utils.progress import run_script

# Colours of runs, far enough apart, and the nearest of a terminal's 256; grey is for what all runs share.
COLORS = {
    "tab:blue": 33,
    "tab:orange": 208,
    "tab:green": 34,
    "tab:red": 160,
    "tab:purple": 135,
    "tab:brown": 130,
    "tab:pink": 212,
    "tab:olive": 142,
    "tab:cyan": 38,
}
GREY, GREY_OF_256 = "tab:gray", 245
CURVES = {"loss": "train", "val_loss": "eval", "learning_rate": "train", "grad_norm": "train"}
CURVES |= {"tokens_per_second": "train"}
PANELS = {
    "loss": "loss, nats per character",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}
DASH = 3  # columns

Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Run:
    """What metrics.jsonl says of a run.

    Args:
        name: the end of its path that no other run's path has
        curves: for each key of `CURVES`, steps in order, and a number for each
        restarts: steps from which it was started again, each with the numbers of ranks before and after if they differ
    """

    name: str
    curves: dict[str, Curve]
    restarts: dict[int, list[int]]


def curve(rows: Sequence[dict[str, Any]], event: str, key: str) -> Curve:
    """Steps and what rows of this event say under the key, where it is a number; one without is left out."""
    found = [(row["step"], row.get(key)) for row in rows if row["event"] == event]
    known = [(step, value) for step, value in found if isinstance(value, float | int) and abs(value) < 1e300]
    return [step for step, _ in known], [value for _, value in known]


def restarts(rows: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Steps from which a run went on, each with the numbers of ranks before and after if they differ."""
    starts = [(row["step"], row.get("world_size")) for row in rows if row["event"] == "start"]
    found: dict[int, list[int]] = {step: [] for step, _ in starts[:1] if step > 0}
    for (_, before), (step, after) in pairwise(starts):
        sizes = found.setdefault(step, [])
        if before and after and before != after:
            sizes += [after] if sizes else [before, after]
    return found


def words(sizes: Sequence[int]) -> str:
    """What is written at a change of the number of ranks."""
    return f"{' → '.join(map(str, sizes))} ranks"


def names(folders: Sequence[Path]) -> list[str]:
    """For each folder the shortest end of its path that no other's has; what a terminal can't show is replaced."""
    parts = [folder.parts for folder in folders]
    ends = [
        next(Path(*mine[-n:]) for n in count(1) if [other[-n:] for other in parts].count(mine[-n:]) == 1)
        for mine in parts
    ]
    return ["".join(c if c.isprintable() else "\ufffd" for c in str(end)) for end in ends]


def read(folder: Path, name: str) -> Run:
    """A run from its folder.

    Raises:
        UserError: the folder is none of a run, or the run has not told a loss yet.
    """
    file = folder / "metrics.jsonl"
    if not os.path.isfile(file):
        inside = [other for other in folder.parents if os.path.isfile(other / "metrics.jsonl")]
        below = sorted(other.parent for other in folder.glob("*/metrics.jsonl"))
        near = f"did you mean {' '.join(map(str, inside[:1] or below))}?" if inside or below else ""
        near = near or "main.py writes one into trainer.run_dir when training begins"
        raise UserError(f"there is no metrics.jsonl in {folder}, so it is no run folder; {near}")
    try:
        rows, others = read_metrics(file)
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from error
    if others:
        print(f"{file}: {others} line{'s' * (others > 1)} left out, for not being rows", file=sys.stderr)
    rows.sort(key=lambda row: row["step"])
    run = Run(name, {key: curve(rows, event, key) for key, event in CURVES.items()}, restarts(rows))
    if not run.curves["loss"][0]:
        raise UserError(f"{file} has no train row with a loss; the first comes after trainer.log_every steps")
    return run


def draw(runs: Sequence[Run], file: Path) -> None:
    """Four panels over the same steps. Earlier runs' lines are wider, so that they show under equal ones.

    Raises:
        UserError: the file can't be written, or its ending tells no format.
    """
    from matplotlib import ticker  # noqa: PLC0415 - only where something is drawn
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.lines import Line2D  # noqa: PLC0415

    figure = Figure(figsize=(9, 8), dpi=100, layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise UserError(f"--out: {file} must end with one of .{', .'.join(formats)}")
    places = figure.subplots(len(PANELS), sharex=True, height_ratios=(3, 1, 1, 1))
    wide = np.linspace(4.0, 1.2, len(runs)) if len(runs) > 1 else [1.5]
    changed = [run for run in runs if any(run.restarts.values())]
    for run, color, width in zip(runs, COLORS, wide, strict=False):
        for place, key in zip(places, PANELS, strict=True):
            steps, values = run.curves[key]
            place.plot(steps, values, color=color, linewidth=width, marker="." if len(steps) == 1 else "")
            for step in run.restarts:
                place.axvline(step, color=GREY, linewidth=1, linestyle=":")
        places[0].plot(*run.curves["val_loss"], "o--", color=color, linewidth=0.8, markersize=3 + width)
        for step, sizes in run.restarts.items():
            if sizes:
                height = 0.97 - 0.3 * (changed.index(run) % 3)
                places[0].annotate(
                    words(sizes),
                    (step, height),
                    (3, 0),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    color=color,
                    rotation="vertical",
                    verticalalignment="top",
                )
    for place, title in zip(places, PANELS.values(), strict=True):
        place.set_ylabel(title)
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
        place.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.10g}"))
    for place in places[1:]:
        place.set_ylim(bottom=0)
    places[-1].set_xlabel("step")
    places[-1].xaxis.set(
        major_locator=ticker.MaxNLocator(integer=True), major_formatter=ticker.StrMethodFormatter("{x:,.0f}")
    )
    figure.align_ylabels()
    shared = {"validation loss": Line2D([], [], color=GREY, marker="o", linestyle="--", linewidth=0.8)}
    if any(run.restarts for run in runs):
        shared["restart"] = Line2D([], [], color=GREY, linestyle=":")
    lines = [Line2D([], [], color=color, linewidth=width) for color, width in zip(COLORS, wide, strict=False)]
    labels = [run.name for run in runs] + list(shared)
    columns = max(1, min(len(labels), 90 // (max(map(len, labels)) + 6)))
    legend = figure.legend([*lines, *shared.values()], labels, loc="outside upper left", ncols=columns, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # $ is one in a name
    try:
        figure.savefig(file)
    except (OSError, RuntimeError) as error:  # the latter where a format needs a program that is not there
        raise UserError(f"--out: {file} can't be written: {error}") from error


def told(run: Run) -> str:
    """What a run came to, in words."""
    steps, losses = run.curves["loss"]
    last = f"{run.name}: loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if run.curves["val_loss"][0]:
        steps, losses = run.curves["val_loss"]
        last += f", validation loss {losses[-1]:.4f} at step {steps[-1]:,}"
    if number := len(run.restarts):
        last += f", restarted at {number} step{'s' * (number > 1)} (┊)"
    return last


def picture(runs: Sequence[Run], width: int, height: int, color: bool) -> str:
    """Loss as lines and validation loss as dots, for the terminal, and what each run came to.

    Without color they are letters, small and capital. Later runs' lines are dashed, so that equal ones show between.

    Args:
        runs: at most as many as there are `COLORS`
        width: columns, at least 20
        height: rows of the picture alone, at least 8
        color: whether it may hold codes of colour
    """
    import plotext  # noqa: PLC0415 - only where something is drawn
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    def pixel(code: int) -> plotext.pixel:
        return plotext.pixel(code if color else None, "default")

    plotext.terminal.limit(False, False)  # it would be that of a terminal, where there may be none
    figure = plotext.figure.clear().theme("simple").canvas("default").plot_size(width, height)
    figure.title("loss and validation loss, nats per character").label("step")
    shown = [run.curves[key] for run in runs for key in ("loss", "val_loss")]
    shown += [(list(run.restarts), []) for run in runs]
    for axis, (side, ticks) in enumerate({"x": width // 12, "y": height // 4}.items()):
        numbers = [number for curve in shown for number in curve[axis]]
        margin = int(min(numbers) == max(numbers))
        low, high = min(numbers) - margin, max(numbers) + margin
        known = [tick for tick in MaxNLocator(ticks, integer=side == "x").tick_values(low, high) if low <= tick <= high]
        figure.ruler(side, "both").lim(low, high).frequency(0)
        figure.ruler(side).ticks(known, [f"{tick:,.10g}" for tick in known])
    marks: dict[float, Any] = {}
    legend: list[str] = []
    for number, (run, code) in enumerate(zip(runs, COLORS.values(), strict=False)):
        letter = chr(ord("a") + number)
        line, dot = ("braille", "●") if color else (letter, letter.upper())
        for step, sizes in run.restarts.items():
            marks[step] = plotext.colorize(words(sizes), pixel(code)) if sizes else marks.get(step, "")
        steps, losses = run.curves["loss"]
        columns = np.linspace(steps[0], steps[-1], width)
        values = np.interp(columns, steps, losses)
        for start in range(DASH * (number % 3), width, DASH * min(len(runs), 3)) if number else [0]:
            dash = slice(start, start + DASH + 1 if number else None)
            signal = figure.signal(
                columns[dash].tolist(), values[dash].tolist(), marker=plotext.marker(line, pixel(code))
            )
            figure.draw(signal.lines())
        if run.curves["val_loss"][0]:
            steps, losses = run.curves["val_loss"]
            figure.draw(figure.signal(steps, losses, marker=plotext.marker(dot, pixel(code))))
        legend += [
            plotext.colorize(line, pixel(code)).string(colorless=not color)
            for line in textwrap.wrap(f"{'━' if color else letter}{dot} {told(run)}", width, subsequent_indent="   ")
        ]
    ruler = figure.ruler("x", "upper").ticks(list(marks), list(marks.values()))
    ruler.grid(True, "dotted", pixel(GREY_OF_256))
    return "\n".join([figure.build().string(colorless=not color).rstrip("\n"), *legend])


def run(argv: Sequence[str]) -> None:
    """Draws the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (main.py's trainer.run_dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: plot.png in the first run folder)")
    asked = parser.parse_args(argv)
    folders = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in asked.runs))
    if len(folders) > len(COLORS):
        raise UserError(f"{len(folders)} runs can't be told apart; draw {len(COLORS)} at most")
    out = asked.out or asked.runs[0] / "plot.png"
    runs = [read(folder, name) for folder, name in zip(folders, names(folders), strict=True)]
    draw(runs, out)
    columns, rows = shutil.get_terminal_size()
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(picture(runs, max(columns, 20), max(10, min(rows - 2 * len(runs) - 2, 30)), color))
    print(f"drawn: {out}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run_script(run))
