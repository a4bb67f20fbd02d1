"""The log of a run: rows for metrics.jsonl, TensorBoard, Weights & Biases and the terminal.

A row is an event (start, train, eval, sample, snapshot, stop) at a step, with values. Each sink shows some of them.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from tqdm import tqdm

from mingpt.config.schema import Config, config_to_dict
from mingpt.config.yaml_format import dump_config
from mingpt.errors import UserError
from mingpt.files import replace_file, replaced_file
from mingpt.monitoring.logging import logger

Values = Mapping[str, Any]  # of a row, by name


class RunLog:
    """The rows of a run. Nothing is written or shown before `open`, which only rank 0 calls."""

    def __init__(self) -> None:
        self.sinks: list[MetricsFile | TensorBoard | WeightsAndBiases | Terminal] = []

    def open(self, config: Config, step: int, last_step: int) -> None:
        """Writes config.yaml and opens all sinks. They remove the rows of steps after `step`.

        Raises:
            UserError: the run folder can't be written, or wandb is missing or refuses to start.
        """
        folder = Path(config.trainer.run_dir)
        try:
            replace_file(folder / "config.yaml", dump_config(config_to_dict(config)))
            self.sinks = [MetricsFile(folder, step), TensorBoard(folder, step), Terminal(step, last_step)]
            if config.trainer.wandb_project is not None:
                self.sinks.append(WeightsAndBiases(config))
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: a file in {folder} can't be read and written: {error}; change its permissions, or "
                "set another folder"
            ) from error

    def write(self, event: str, step: int, **values: Any) -> None:
        """Writes a row. Training continues if a sink fails, which is tried again with the next row."""
        for sink in self.sinks:
            try:
                sink.write(event, step, values)
            except Exception as error:  # wandb raises errors of several classes
                logger.warning(f"step {step}: metrics can't be written to {sink.name}: {error}; training continues")

    def close(self) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                logger.warning(f"{sink.name} can't be closed: {error}")
        self.sinks = []


class MetricsFile:
    """metrics.jsonl. Opening it removes rows of steps after `step`, and torn ones.

    Raises:
        OSError: it can't be written.
    """

    name = "metrics.jsonl"

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            with replaced_file(self.path) as kept:
                kept.writelines(_encode_row(row) for row in iter_metrics(self.path) if row["step"] <= step)
        else:
            self.path.touch()
        # It stays this run's file if the folder is moved.
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, event: str, step: int, values: Values) -> None:
        """Appends a row with a single write, so that a kill or a full disk leaves at most one torn row."""
        line = _encode_row({"event": event, "step": step, "time": time.time(), **values})
        size = self.file.seek(0, os.SEEK_END)
        if self.file.write(line) < len(line):
            self.file.truncate(size)  # otherwise the next row would be lost with the torn one
            raise OSError("the disk is full")

    def close(self) -> None:
        self.file.close()


def _encode_row(row: Values) -> bytes:
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

        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, event: str, step: int, values: Values) -> None:
        if event == "sample":
            self.writer.add_text("sample", indent(values["text"], "    "), step)  # verbatim, in Markdown
        elif event in ("train", "eval"):
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        self.writer.flush()  # else a thread would open the file by its name later, when the folder may be another run's

    def close(self) -> None:
        self.writer.close()


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
            )
        except wandb.Error as error:
            raise UserError(
                f"trainer.wandb_project: {error}; run `wandb login`, set WANDB_MODE=offline in the environment, or set "
                "the key to null"
            ) from error
        replace_file(file, self.run.id)

    def write(self, event: str, step: int, values: Values) -> None:
        if event in ("train", "eval"):
            self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Waits until the values are sent."""
        self.run.finish()


class Terminal:
    """Log lines, and on a terminal a bar below them, which has the train rows.

    Args:
        step: the step at which this process starts
    """

    name = "the terminal"

    def __init__(self, step: int, last_step: int) -> None:
        self.first_step = step
        self.last_step = last_step
        self.started = time.monotonic()
        self.bar = tqdm(
            total=last_step,
            initial=step,
            bar_format="{n_fmt}/{total_fmt} {bar} {remaining} left{postfix}",
            smoothing=0,  # the time left is at the average pace so far
            ncols=shutil.get_terminal_size().columns - 1,  # tqdm would show nothing if `docker exec -t` reports 0 rows
            nrows=20,
            disable=None,  # if stdout is not a terminal
            file=sys.stdout,
        )

    def write(self, event: str, step: int, values: Values) -> None:
        if event == "train":
            self.bar.n = step
            self.bar.set_postfix_str(f"loss {values['loss']:.4f}, {values['tokens_per_second']:,.0f} tokens/s")
            if self.bar.disable:
                pace = (time.monotonic() - self.started) / (step - self.first_step)
                logger.info(
                    f"step {step:>{len(str(self.last_step))}}/{self.last_step}  loss {values['loss']:.4f}  "
                    f"lr {values['learning_rate']:.2e}  grad_norm {values['grad_norm']:.2f}  "
                    f"{values['tokens_per_second']:,.0f} tokens/s  {duration(pace * (self.last_step - step))} left"
                )
        elif event == "eval":
            logger.info(
                f"step {step}: validation loss {values['val_loss']:.4f} nats per token, {values['val_bpb']:.4f} bits "
                f"per byte ({values['seconds']:.1f} s)"
            )
        elif event == "sample":
            # Some characters would move the cursor.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in values["text"])
            logger.info(f"step {step} continues {values['prompt']!r}:\n{indent(shown.strip(), '    ')}")

    def close(self) -> None:
        """Leaves the bar on the terminal."""
        self.bar.close()


def duration(seconds: float) -> str:
    """Formats a duration like 1:02:33."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


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
    """Yields the rows of a metrics.jsonl, without torn ones.

    Raises:
        OSError: it can't be read, or is not a regular file.
    """
    with open(file, "rb") as lines:
        for line in lines:
            with suppress(ValueError):
                yield json.loads(line)
