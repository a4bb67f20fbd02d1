"""Plots loss, learning rate and speed of runs from their metrics.jsonl.

    python plot.py
    python plot.py runs/default runs/other --out both.png

Dotted lines mark steps from which a run resumed.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mingpt.config.parser import read_config
from mingpt.errors import UserError
from mingpt.monitoring.run_log import iter_metrics
from mingpt.program import run_program
from mingpt.system.signals import is_interactive

PANELS = {
    "loss": "loss, nats per token",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}

Curve = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Run:
    """The metrics of a run."""

    name: str  # in the plots
    curves: dict[str, Curve]  # for each key of PANELS, and val_loss
    restarts: list[int]  # steps


def read_run(folder: Path) -> Run:
    """Reads the metrics of a run folder; raises a UserError if it is not a run folder, or does not have a loss yet."""
    file = folder / "metrics.jsonl"
    try:
        rows = list(iter_metrics(file))
    except OSError as error:
        raise UserError(
            f"{file} can't be read: {error.strerror}; name the trainer.run_dir of a run that has begun"
        ) from error
    measured = [row for row in rows if row["event"] in ("train", "eval")]
    curves = {}
    for key in (*PANELS, "val_loss"):
        points = [(row["step"], row[key]) for row in measured if row.get(key) is not None]
        curves[key] = ([step for step, _ in points], [value for _, value in points])
    if not curves["loss"][0]:
        raise UserError(f"{file} does not contain a training loss yet; trainer.log_every sets the steps between rows")
    starts = [row["step"] for row in rows if row["event"] == "start"]
    name = str(folder).encode(errors="replace").decode()  # matplotlib draws only valid Unicode
    return Run(name, curves, starts[1:])


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draws the panels into a file. Lines of earlier runs are wider, so that later lines do not hide them.

    Raises:
        UserError: the file can't be written, or its suffix is not an image format.
    """
    if not is_interactive():  # a notebook sets it, also for child processes, which may not know the value
        os.environ.pop("MPLBACKEND", None)
    from matplotlib.figure import Figure  # noqa: PLC0415 - the import is slow, and mistakes are reported before

    # It warns of each character of a name that its font lacks, and draws a box.
    warnings.filterwarnings("ignore", "Glyph")
    figure = Figure(figsize=(9, 8), dpi=100, layout="constrained")
    axes = figure.subplots(len(PANELS), sharex=True, height_ratios=(3, 1, 1, 1))
    for ax, (key, title) in zip(axes, PANELS.items(), strict=True):
        ax.set_ylabel(title)
        ax.grid(alpha=0.25)
        for i, run in enumerate(runs):
            width = 5.5 - 4 * (i + 1) / len(runs)
            ax.plot(*run.curves[key], f"C{i}", linewidth=width, label=f"loss of {run.name}".replace("$", r"\$"))
            for step in run.restarts:
                ax.axvline(step, color="tab:gray", linewidth=1, linestyle=":")
            if key == "loss":
                ax.plot(*run.curves["val_loss"], f"C{i}o--", linewidth=0.8, markersize=3 + width)
    if any(run.curves["val_loss"][0] for run in runs):
        axes[0].plot([], [], "o--", color="tab:gray", label="validation loss")
    if any(run.restarts for run in runs):
        axes[0].plot([], [], ":", color="tab:gray", label="step from which it resumed")
    axes[0].legend(frameon=False)
    for ax in axes[1:]:
        ax.set_ylim(bottom=0)
    axes[-1].set_xlabel("step")
    figure.align_ylabels()
    try:
        figure.savefig(file, format=file.suffix[1:] or "png")
    except (OSError, ValueError) as error:  # ValueError: unknown format
        raise UserError(f"--out: {file} can't be written: {error}; name another file") from error


def run(argv: Sequence[str]) -> None:
    """Plots the given runs into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folder (default: the run of gpt2_train_cfg.yaml)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="file, or folder for plot.png (default: the first run folder)"
    )
    args = parser.parse_args(argv)
    folders = args.runs or [Path(read_config().trainer.run_dir)]
    runs = [read_run(folder) for folder in folders]
    out = args.out or folders[0]
    if out.is_dir():
        out /= "plot.png"
    draw(runs, out)
    print(f"drawn: {out}", flush=True)


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
