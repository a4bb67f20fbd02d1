"""Plots loss, learning rate and speed of runs from their metrics.jsonl.

    python plot.py
    python plot.py runs/default runs/other --out both.png

Dotted lines mark steps from which a run resumed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mingpt.config.parser import read_config
from mingpt.errors import UserError
from mingpt.monitoring.run_log import iter_metrics
from mingpt.program import run_program

PANELS = {
    "loss": "loss, nats per token",
    "val_bpb": "validation, bits per byte",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}

Rows = list[dict[str, Any]]  # of metrics.jsonl


def read_rows(folder: Path) -> Rows:
    """Reads the metrics of a run folder; raises a UserError if it is not a run folder."""
    try:
        return list(iter_metrics(folder / "metrics.jsonl"))
    except OSError as error:
        raise UserError(
            f"{folder}/metrics.jsonl can't be read: {error.strerror}; name the trainer.run_dir of a run that has begun"
        ) from error


def curve(rows: Rows, event: str, key: str) -> tuple[list[int], list[float]]:
    """Returns the steps and the values of a key in the rows of an event, without rows where it is null or missing."""
    points = [(row["step"], row[key]) for row in rows if row["event"] == event and row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw(runs: dict[str, Rows], file: Path) -> None:
    """Draws runs, by their names, into a file.

    Raises:
        UserError: the file can't be written, or its suffix is not an image format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - the import is slow, and mistakes are reported before

    figure = Figure(figsize=(9, 10), layout="constrained")
    axes = figure.subplots(len(PANELS), sharex=True, height_ratios=(3, 1, 1, 1, 1))
    for ax, (key, title) in zip(axes, PANELS.items(), strict=True):
        ax.set_ylabel(title)
        ax.grid(alpha=0.25)
        for i, (name, rows) in enumerate(runs.items()):
            ax.plot(*curve(rows, "eval" if key == "val_bpb" else "train", key), f"C{i}", label=f"loss of {name}")
            if key == "loss":
                ax.plot(*curve(rows, "eval", "val_loss"), f"C{i}o--", label=f"validation loss of {name}")
            starts, _ = curve(rows, "start", "step")
            for start in starts[1:]:
                ax.axvline(start, color=f"C{i}", linestyle=":")
    axes[0].legend()
    axes[-1].set_xlabel("step")
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
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: plot.png in the first run folder")
    args = parser.parse_args(argv)
    folders = args.runs or [Path(read_config().trainer.run_dir)]
    out = args.out or folders[0] / "plot.png"
    draw({str(folder): read_rows(folder) for folder in folders}, out)
    print(f"drawn: {out}", flush=True)


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
