"""What is recorded of a run? metrics.jsonl for programs, events for TensorBoard; the screen is told of each row."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from mingpt.utils.errors import UserError
from mingpt.utils.progress import ProgressLine, complain, say

CURVES = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "world_size", "val_loss")


class Metrics:
    """The run's record in metrics.jsonl and TensorBoard's events, and its progress on the screen.

    Args:
        folder: the run folder
        step: the step that training goes on from; rows of later ones, and a torn last row, are removed
        last_step: the step that it ends with

    Raises:
        UserError: the files can't be written.
    """

    def __init__(self, folder: Path, step: int, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - who reads rows alone need not wait for torch

        file = folder / "metrics.jsonl"
        try:
            _forget_after(file, step)
            self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self.events = SummaryWriter(str(folder), purge_step=step + 1)  # TensorBoard hides what a kill undid
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: {file} can't be written: {error.strerror}; make it writable, or set another"
            ) from error
        self.line = ProgressLine(step, last_step)

    def row(self, event: str, step: int, **values: Any) -> None:
        """Appends one row; it is one write, so that a kill leaves at most one torn row, the last."""
        line = json.dumps({"event": event, "step": step, "time": time.time(), **values})
        try:
            os.write(self.descriptor, line.encode() + b"\n")
            for name in CURVES:
                if values.get(name) is not None and event in ("train", "eval"):
                    self.events.add_scalar(name, values[name], step)
            if event == "sample":
                self.events.add_text("sample", indent(values["text"], "    "), step)  # as it is, in markdown
        except OSError as error:
            complain(f"step {step}: trainer.run_dir: metrics can't be written: {error}; training goes on")

    def advance(self, step: int) -> None:
        """Moves the live line to a finished step."""
        self.line.advance(step)

    def train(self, step: int, **values: float | int) -> None:
        """Records and shows a step's loss and speed."""
        self.row("train", step, **values)
        line = self.line
        line.told |= {"loss": f"loss {values['loss']:.3f}", "speed": f"{_short(values['tokens_per_second'])} tok/s"}
        if line.disable:
            say(
                f"step {step:>{len(str(line.last))}}/{line.last}  loss {values['loss']:.4f}  "
                f"lr {values['learning_rate']:.2e}  grad_norm {values['grad_norm']:.2f}  "
                f"{values['tokens_per_second']:,.0f} tokens/s  {line.left()} left"
            )
        line.refresh()

    def evaluation(self, step: int, val_loss: float, seconds: float) -> None:
        """Records and shows a validation loss."""
        self.row("eval", step, val_loss=val_loss)
        self.line.told["val"] = f"val {val_loss:.3f}"
        say(f"step {step}: validation loss {val_loss:.4f} nats per character ({seconds:.1f} s)")

    def sample(self, step: int, text: str) -> None:
        """Records and shows what the model writes; what would move the cursor is left out."""
        self.row("sample", step, text=text)
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        say(f"step {step} writes:\n{indent(shown.strip(), '    ')}")

    def snapshot(self, step: int, **values: Any) -> None:
        """Records what came of a snapshot: path and val_loss, or error."""
        self.row("snapshot", step, **values)
        if "path" in values:
            self.line.saved_at = time.monotonic()

    def close(self) -> None:
        """Leaves the line as it is and closes the files."""
        self.line.close()
        with suppress(OSError):  # of which each row has told
            self.events.close()
        os.close(self.descriptor)


class NullMetrics(Metrics):
    """What ranks other than the first have: the same methods, and nothing happens."""

    def __init__(self) -> None:
        quiet: Callable[..., None] = lambda *arguments, **values: None  # noqa: E731
        self.row = self.advance = self.train = self.evaluation = quiet  # type: ignore[method-assign]
        self.sample = self.snapshot = self.close = quiet  # type: ignore[method-assign]


def _short(number: float) -> str:
    """Three digits and k, M or G."""
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.0f}"


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a metrics.jsonl, and how many of its lines are none; a torn last one is left out and not counted.

    Raises:
        OSError: the file can't be read.
    """
    rows, others = [], 0
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("event"), str) and type(row.get("step")) is int:
                rows.append(row)
            else:
                others += 1
    return rows, others


def _forget_after(file: Path, step: int) -> None:
    """Rewrites metrics.jsonl without rows of later steps and without a torn one, beside it and renamed."""
    if not file.exists():
        return
    rows, _ = read_metrics(file)
    beside = file.with_name(f"{file.name}.tmp")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
    os.replace(beside, file)
