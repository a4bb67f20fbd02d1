"""Metrics of a run: metrics.jsonl, TensorBoard's events, and log lines."""

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any

from mingpt.errors import UserError
from mingpt.files import replace_file
from mingpt.monitoring.logging import logger
from mingpt.monitoring.progress import ProgressLine
from mingpt.monitoring.wandb_run import WandbRun

SCALARS = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "world_size", "val_loss")


class MetricsLogger:
    """Writes metrics.jsonl and TensorBoard's events, and shows progress, in a run from `step` to `last_step`.

    It removes rows of later steps than `step` and a torn last row. A `tracker` gets the values of TensorBoard too.

    Raises:
        UserError: the files can't be written.
    """

    is_open = True

    def __init__(self, folder: Path, step: int, last_step: int, tracker: WandbRun | None = None) -> None:
        from mingpt.monitoring.tensorboard import EventFile  # noqa: PLC0415 - slow, and read_metrics needs no torch

        file = folder / "metrics.jsonl"
        try:
            _remove_rows_after(step, file)
            self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self.events = EventFile(folder, purge_step=step + 1)  # TensorBoard hides later steps
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: {file} can't be written: {error.strerror}; make it writable, or set another"
            ) from error
        self.tracker = tracker
        self.is_torn = False  # the last row in the file has no end
        self.line = ProgressLine(step, last_step)

    def log(self, event: str, step: int, **values: Any) -> None:
        """Appends a row by a single write, so that a kill leaves at most one torn row, the last."""
        row = json.dumps({"event": event, "step": step, "time": time.time(), **values})
        try:
            self._append(row)
            if event in ("train", "eval"):
                scalars = {name: values[name] for name in SCALARS if values.get(name) is not None}
                self.events.add_scalars(step, scalars)
                if self.tracker is not None:
                    self.tracker.add_scalars(step, scalars)
            if event == "sample":
                self.events.add_text(step, "sample", indent(values["text"], "    "))  # verbatim, in markdown
        except OSError as error:
            logger.warning(f"step {step}: trainer.run_dir: metrics can't be written: {error}; training continues")

    def _append(self, row: str) -> None:
        line = row.encode() + b"\n"
        if self.is_torn:
            line = b"\n" + line  # or this row would be lost with the torn one
        written = os.write(self.descriptor, line)
        if written:
            self.is_torn = written < len(line)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def advance(self, step: int, loss: float) -> None:
        """Moves the live line on to a step, with its loss unless that is nan."""
        if not math.isnan(loss):
            self.line.fields["loss"] = f"loss {loss:.3f}"
        self.line.advance(step)

    def log_train(self, step: int, **values: float | int) -> None:
        self.log("train", step, **values)
        line = self.line
        loss = values["loss"]
        speed = values["tokens_per_second"]
        line.fields["speed"] = f"{_format_short(speed)} tok/s"
        if line.disable:
            logger.info(
                f"step {step:>{len(str(line.last_step))}}/{line.last_step}  loss {loss:.4f}  "
                f"lr {values['learning_rate']:.2e}  grad_norm {values['grad_norm']:.2f}  "
                f"{speed:,.0f} tokens/s  {line.time_left()} left"
            )
        line.refresh()

    def show_evaluation(self, done: float | None) -> None:
        """Shows in the live line which part of an evaluation is done; None: it has ended."""
        self.line.show_evaluation(done)

    def log_eval(self, step: int, val_loss: float, seconds: float) -> None:
        self.log("eval", step, val_loss=val_loss)
        self.line.fields["val"] = f"val {val_loss:.3f}"
        logger.info(f"step {step}: validation loss {val_loss:.4f} nats per character ({seconds:.1f} s)")

    def log_sample(self, step: int, text: str) -> None:
        """Writes and shows generated text; characters that would move the cursor are replaced."""
        self.log("sample", step, text=text)
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        logger.info(f"step {step} writes:\n{indent(shown.strip(), '    ')}")

    def log_snapshot(self, step: int, **values: Any) -> None:
        """Writes the result of a save: path and val_loss, or error."""
        self.log("snapshot", step, **values)
        if "path" in values:
            self.line.saved_at = time.monotonic()

    def close(self) -> None:
        self.line.close()
        self.events.close()
        os.close(self.descriptor)
        if self.tracker is not None:
            self.tracker.close()


class NullMetricsLogger(MetricsLogger):
    """Does nothing, on ranks other than 0."""

    is_open = False

    def __init__(self) -> None: ...

    def _ignore(self, *args: Any, **kwargs: Any) -> None: ...

    log = _ignore
    advance = _ignore
    log_train = _ignore
    show_evaluation = _ignore
    log_eval = _ignore
    log_sample = _ignore
    log_snapshot = _ignore
    close = _ignore


class StepTimer:
    """Measures throughput without pauses, from a number of samples on."""

    def __init__(self, samples: int) -> None:
        self.started = time.perf_counter()
        self.since = self.started
        self.samples = samples

    @property
    def elapsed(self) -> float:
        """Seconds since the start, pauses included."""
        return time.perf_counter() - self.started

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of its block, such as evaluation, from throughput."""
        paused = time.perf_counter()
        yield
        self.since += time.perf_counter() - paused

    def tokens_per_second(self, samples: int, tokens_per_sample: int) -> float:
        """Returns the average rate since the last call, given the number of samples so far."""
        now = time.perf_counter()
        rate = (samples - self.samples) * tokens_per_sample / (now - self.since)
        self.since = now
        self.samples = samples
        return rate


def _format_short(number: float) -> str:
    """Formats three digits and k, M or G."""
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.0f}"


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the rows of a metrics.jsonl, and how many other lines it has; a torn last one is not counted."""
    rows = []
    others = 0
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


def saved_steps(file: Path) -> list[int]:
    """Returns the steps whose snapshots were written, according to a metrics.jsonl, which need not exist."""
    if not file.is_file():
        return []
    rows, _ = read_metrics(file)
    return [row["step"] for row in rows if row["event"] == "snapshot" and "path" in row]


def _remove_rows_after(step: int, file: Path) -> None:
    """Replaces metrics.jsonl by a file without rows of later steps and without a torn one."""
    if file.exists():
        rows, _ = read_metrics(file)
        replace_file(file, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
