"""The log of a run: rows for metrics.jsonl, TensorBoard, Weights & Biases and the terminal.

A row is an event (start, train, eval, sample, snapshot, stop) at a step, with values. Each sink shows some of them.
"""

import errno
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from mingpt.config.schema import MAX_STEPS, Config, config_to_dict
from mingpt.config.yaml_format import dump_config
from mingpt.errors import UserError
from mingpt.files import replace_file, replaced_file
from mingpt.monitoring.live_line import LiveLine
from mingpt.monitoring.logging import logger


class RunLog:
    """The rows of a run. Nothing is written or shown before `open`, which only rank 0 calls."""

    def __init__(self) -> None:
        self.sinks: list[MetricsFile | TensorBoard | WeightsAndBiases | Terminal] = []
        self.line = LiveLine(0, 0, is_shown=False)

    def open(self, config: Config, step: int, last_step: int) -> None:
        """Writes config.yaml and opens all sinks. They remove the rows of later steps than `step`.

        Raises:
            UserError: the run folder can't be written, or wandb refuses to start.
        """
        folder = Path(config.trainer.run_dir)
        try:
            replace_file(folder / "config.yaml", dump_config(config_to_dict(config)))
            self.sinks = [MetricsFile(folder, step), TensorBoard(folder, step)]
            if config.trainer.wandb_project is not None:
                self.sinks.append(WeightsAndBiases(config))
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: a file in {folder} can't be read and written: {error}; change its permissions, or "
                "set another folder"
            ) from error
        self.line = LiveLine(step, last_step, is_shown=sys.stdout.isatty())
        self.sinks.append(Terminal(self.line))

    def write(self, event: str, step: int, **values: Any) -> None:
        errors = []
        for sink in self.sinks:
            try:
                sink.write(event, step, values)
            except OSError as error:
                errors.append(error)
        if errors:
            logger.warning(f"step {step}: trainer.run_dir: metrics can't be written: {errors[0]}; training continues")

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.sinks = []


class MetricsFile:
    """metrics.jsonl. Opening it removes rows of later steps than `step`, and a torn last row.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        file = folder / "metrics.jsonl"
        if file.exists():
            with replaced_file(file) as kept:
                for row in iter_metrics(file):
                    if row is not None and row["step"] <= step:
                        kept.write(_encode_row(row))
        self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Appends a row with a single write, so that a kill leaves at most one torn row, the last one."""
        line = _encode_row({"event": event, "step": step, "time": time.time(), **values})
        size = os.fstat(self.descriptor).st_size
        if os.write(self.descriptor, line) < len(line):
            os.ftruncate(self.descriptor, size)  # otherwise the next row would be lost with the torn one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self.descriptor)


def _encode_row(row: Mapping[str, Any]) -> bytes:
    """Returns a line of JSON. Infinity, the norm of fp16 gradients that overflow, is not JSON and becomes null."""
    values = {}
    for name, value in row.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        values[name] = value if is_finite else None
    return json.dumps(values).encode() + b"\n"


class TensorBoard:
    """A file of TensorBoard's events. It hides rows of later steps than `step` in earlier files.

    The events are written here, since a SummaryWriter's thread ends with a traceback when the disk is full.

    Raises:
        OSError: the events can't be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self._open()
        self._add(step=step + 1, session_log={"status": "START"})
        self.file.flush()

    def _open(self) -> None:
        """Begins another file."""
        # They import PyTorch, which plot.py does not need.
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415
        from torch.utils.tensorboard import summary  # noqa: PLC0415

        # TensorBoard reads files in the order of their names, which begin with the time in seconds. Another file may
        # have the same time, or a later one if its clock was ahead.
        stamp = int(time.time())
        for file in self.folder.glob("events.out.tfevents.*"):
            stamp = max(stamp, int(file.name.split(".")[3]) + 1)
        self.event = Event
        self.summary = summary
        self.file = open(self.folder / f"events.out.tfevents.{stamp}.{platform.node()}", "wb")  # noqa: SIM115
        self.records = RecordWriter(self.file)
        self._add(file_version="brain.Event:2")

    def _add(self, **fields: Any) -> None:
        self.records.write(self.event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if event not in ("train", "eval", "sample"):
            return
        if self.file.closed:
            self._open()
        try:
            for name, value in values.items():
                if event == "sample":
                    shown = self.summary.text("sample", indent(value, "    "))  # verbatim, in Markdown
                else:
                    shown = self.summary.scalar(name, value)
                self._add(step=step, summary=shown)
            self.file.flush()  # otherwise a kill would lose the newest rows
        except OSError:
            self.close()  # TensorBoard reads nothing after a torn record, so the next row begins another file
            raise

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()


class WeightsAndBiases:
    """A run in a project of Weights & Biases.

    Its id is in `wandb_id` in the run folder, so that a resumed run continues it. Weights & Biases ignores values of
    steps that it already has.

    Raises:
        UserError: wandb refuses to start, for example without an API key.
    """

    def __init__(self, config: Config) -> None:
        import wandb  # noqa: PLC0415 - optional, and slow

        folder = Path(config.trainer.run_dir)
        file = folder / "wandb_id"
        run_id = file.read_text() if file.exists() else None
        try:
            self.run = wandb.init(
                project=config.trainer.wandb_project,
                id=run_id,
                name=str(folder),
                dir=folder,
                config=config_to_dict(config),
                resume="allow",
                settings=wandb.Settings(console="off"),  # otherwise it would record the live line
            )
        except wandb.Error as error:
            raise UserError(
                f"trainer.wandb_project: {error}; run `wandb login`, set WANDB_MODE=offline in the environment, or set "
                "the key to null"
            ) from error
        self.has_failed = False
        if run_id is None:
            replace_file(file, self.run.id)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if event in ("train", "eval"):
            self._call(lambda: self.run.log(dict(values), step=step))

    def close(self) -> None:
        """Waits until the values are sent."""
        self._call(self.run.finish)

    def _call(self, function: Callable[[], None]) -> None:
        """Calls wandb unless it has failed before, for example because its own process has ended."""
        if self.has_failed:
            return
        try:
            function()
        except Exception as error:  # of several classes
            self.has_failed = True
            logger.warning(f"trainer.wandb_project: wandb has failed: {error}; training continues without it")


def check_wandb(project: str | None) -> None:
    """Raises a UserError if there is a project and wandb, which is optional, is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"trainer.wandb_project is {project}, which needs wandb: run `pip install wandb`, or set the key to null"
        )


class Terminal:
    """Log lines, and the live line if stdout is a terminal. Train rows are shown in one of the two."""

    def __init__(self, line: LiveLine) -> None:
        self.line = line

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        line = self.line
        if event == "train":
            line.fields["speed"] = f"{line.format_sizeof(values['tokens_per_second'])} tok/s"
            if line.disable:
                logger.info(
                    f"step {step:>{len(str(line.last_step))}}/{line.last_step}  loss {values['loss']:.4f}  "
                    f"lr {values['learning_rate']:.2e}  grad_norm {values['grad_norm']:.2f}  "
                    f"{values['tokens_per_second']:,.0f} tokens/s  {line.time_left()} left"
                )
            line.refresh()
        elif event == "eval":
            val_loss = values["val_loss"]
            line.fields["val"] = f"val {val_loss:.3f}"
            logger.info(f"step {step}: validation loss {val_loss:.4f} nats per character ({values['seconds']:.1f} s)")
        elif event == "sample":
            # Some characters would move the cursor.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in values["text"])
            logger.info(f"step {step} writes:\n{indent(shown.strip(), '    ')}")

    def close(self) -> None:
        self.line.close()


class StepTimer:
    """Measures throughput without pauses."""

    def __init__(self, samples: int) -> None:
        self.started = time.perf_counter()
        self.paused = 0.0
        self.since = 0.0
        self.samples = samples

    @property
    def elapsed(self) -> float:
        """Seconds since the start, pauses included."""
        return time.perf_counter() - self.started

    @property
    def training_seconds(self) -> float:
        """Seconds since the start, without pauses."""
        return self.elapsed - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of its block, such as an evaluation, from the time of training."""
        began = time.perf_counter()
        yield
        self.paused += time.perf_counter() - began

    def tokens_per_second(self, samples: int, tokens_per_sample: int) -> float:
        """Returns the average rate since the last call, for a number of samples so far."""
        now = self.training_seconds
        rate = (samples - self.samples) * tokens_per_sample / (now - self.since)
        self.since = now
        self.samples = samples
        return rate


def iter_metrics(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yields each row of a metrics.jsonl, and None for any other line, except for a torn last line.

    Raises:
        OSError: it can't be read.
    """
    with open(file, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError):
                row = None
            yield row if _is_row(row) else None


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return False
    step = value.get("step")
    return type(step) is int and 0 <= step <= MAX_STEPS


def saved_steps(file: Path) -> list[int]:
    """Returns the steps with a snapshot according to a metrics.jsonl, which may not exist."""
    if not file.is_file():
        return []
    rows = filter(None, iter_metrics(file))
    return [row["step"] for row in rows if row["event"] == "snapshot" and "path" in row]
