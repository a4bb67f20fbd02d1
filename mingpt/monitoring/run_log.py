"""The log of a run: rows for metrics.jsonl, TensorBoard, Weights & Biases and the terminal.

A row is an event (start, train, eval, sample, snapshot, stop) at a step, with values. Each sink shows some of them.
"""

import errno
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from mingpt.config.schema import Config, config_to_dict
from mingpt.config.yaml_format import dump_config
from mingpt.errors import UserError
from mingpt.files import replace_file, replaced_file
from mingpt.monitoring.live_line import Terminal
from mingpt.monitoring.logging import logger


class RunLog:
    """The rows of a run. Nothing is written or shown before `open`, which only rank 0 calls."""

    def __init__(self) -> None:
        self.sinks: list[MetricsFile | TensorBoard | WeightsAndBiases | Terminal] = []
        self.began: float | None = None  # time of the first start; None: it is this one
        self.failing: MetricsFile | None = None  # metrics.jsonl, if its newest row could not be written
        self.terminal: Terminal | None = None

    def open(self, config: Config, step: int, last_step: int) -> None:
        """Writes config.yaml and opens all sinks. They remove the rows of steps after `step`.

        Raises:
            UserError: the run folder can't be written, or wandb is missing or refuses to start.
        """
        folder = Path(config.trainer.run_dir)
        try:
            replace_file(folder / "config.yaml", dump_config(config_to_dict(config)))
            metrics = MetricsFile(folder, step)
            self.began = metrics.began
            self.sinks = [metrics, TensorBoard(folder, step)]
            if config.trainer.wandb_project is not None:
                self.sinks.append(WeightsAndBiases(config))
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: a file in {folder} can't be read and written: {error}; change its permissions, or "
                "set another folder"
            ) from error
        self.terminal = Terminal(step, last_step)
        self.sinks.append(self.terminal)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Writes a row. Training continues without a sink that fails; metrics.jsonl is tried again with each row."""
        for sink in list(self.sinks):
            try:
                sink.write(event, step, values)
            except Exception as error:  # wandb raises errors of several classes
                if sink is not self.failing:
                    logger.warning(f"step {step}: metrics can't be written to {sink.name}: {error}; training continues")
                if isinstance(sink, MetricsFile):
                    self.failing = sink
                else:
                    self.sinks.remove(sink)
                continue
            if sink is self.failing:
                self.failing = None
                logger.warning(f"step {step}: metrics are written to {sink.name} again")

    def advance(self, step: int) -> None:
        """Moves the bar of the live line to a finished step. The values beside it come from the newest rows."""
        if self.terminal is not None:
            self.terminal.advance(step)

    def close(self) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                logger.warning(f"{sink.name} can't be closed: {error}")
        self.sinks = []


class MetricsFile:
    """metrics.jsonl. Opening it removes rows of steps after `step`, and torn ones. Lines of other programs stay.

    Raises:
        OSError: it can't be written.
    """

    name = "metrics.jsonl"

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        self.began: float | None = None  # time of the first start
        if self.path.exists():
            with replaced_file(self.path) as kept:
                for value in _iter_json(self.path):
                    if not _is_row(value):
                        kept.write(json.dumps(value).encode() + b"\n")
                    elif value["step"] <= step:
                        if value["event"] == "start":
                            self.began = self.began or value["time"]
                        kept.write(_encode_row(value))
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Appends a row with a single write, so that a kill leaves at most one torn row, the last one."""
        if event == "train":
            # The file may have been removed. The trainer has just checked that the folder is still this run's.
            before = self.file
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            with suppress(OSError):
                before.close()
        line = _encode_row({"event": event, "step": step, "time": time.time(), **values})
        size = self.file.seek(0, os.SEEK_END)
        if self.file.write(line) < len(line):
            self.file.truncate(size)  # otherwise the next row would be lost with the torn one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self.file.close()


def _encode_row(row: Mapping[str, Any]) -> bytes:
    """Returns a line of JSON. Infinity, the norm of fp16 gradients that overflow, is not JSON and becomes null."""
    values = {}
    for name, value in row.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        values[name] = value if is_finite else None
    return json.dumps(values).encode() + b"\n"


class TensorBoard:
    """TensorBoard's events. It hides rows of steps after `step` in earlier files.

    Raises:
        OSError: the events can't be written.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - it imports PyTorch; plot.py does not need it

        self.old_hook = threading.excepthook
        threading.excepthook = _show_thread_error
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if event == "sample":
            self.writer.add_text("sample", indent(values["text"], "    "), step)  # verbatim, in Markdown
        elif event in ("train", "eval"):
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        self.writer.flush()  # else a thread would open the file by its name later, when the folder may be another run's

    def close(self) -> None:
        self.writer.close()
        threading.excepthook = self.old_hook


def _show_thread_error(args: threading.ExceptHookArgs) -> None:
    """Shows the traceback of an error in a thread, except for a full disk, which SummaryWriter.flush reports."""
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)


class WeightsAndBiases:
    """A run in a project of Weights & Biases.

    Its id is in `wandb_id` in the run folder, so that a resumed run continues it. Weights & Biases ignores values of
    steps that it already has.

    Raises:
        UserError: wandb is not installed, or refuses to start, for example without an API key.
    """

    name = "Weights & Biases"

    def __init__(self, config: Config) -> None:
        try:
            import wandb  # noqa: PLC0415 - optional, and slow
        except ImportError as error:
            raise UserError(
                f"trainer.wandb_project: {error}; run `pip install wandb`, or set the key to null"
            ) from error

        folder = Path(config.trainer.run_dir)
        file = folder / "wandb_id"
        try:
            self.run = wandb.init(
                project=config.trainer.wandb_project,
                id=file.read_text() if file.exists() else None,
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
        replace_file(file, self.run.id)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if event in ("train", "eval"):
            self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Waits until the values are sent."""
        self.run.finish()


class StepTimer:
    """Measures throughput without pauses."""

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
        """Excludes the time of its block, such as an evaluation, from the time of training."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def tokens_per_second(self, samples: int, tokens_per_sample: int) -> float:
        """Returns the average rate since the last call, for a number of samples so far."""
        now = time.perf_counter()
        rate = (samples - self.samples) * tokens_per_sample / (now - self.since)
        self.since = now
        self.samples = samples
        return rate


def iter_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics.jsonl, without torn ones and lines of other programs.

    Raises:
        OSError: it can't be read, or is not a regular file.
    """
    return filter(_is_row, _iter_json(file))


def _iter_json(file: Path) -> Iterator[Any]:
    with open(file, "rb") as lines:
        for line in lines:
            with suppress(ValueError, RecursionError):  # RecursionError: of a nested line
                yield json.loads(line, parse_constant=lambda name: None)  # NaN and Infinity of other tools


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and "event" in value and isinstance(value.get("step"), int)
