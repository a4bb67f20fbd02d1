"""What a run says: rows for metrics.jsonl, TensorBoard, Weights & Biases and the terminal.

A row is an event (start, train, eval, sample, snapshot, stop) at a step, with values. Each sink takes from it what it
shows.
"""

import errno
import importlib.util
import json
import os
import threading
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

THREAD_EXCEPTHOOK = threading.excepthook


class RunLog:
    """The rows of a run. They go nowhere before `open`, and on ranks other than 0, which do not call it."""

    def __init__(self) -> None:
        self.sinks: list[MetricsFile | TensorBoard | WeightsAndBiases | Terminal] = []
        self.line: LiveLine | None = None

    def open(self, config: Config, step: int, last_step: int) -> None:
        """Writes config.yaml, and opens all sinks, without rows of later steps than `step`.

        Raises:
            UserError: the run folder can't be written, or wandb refuses to begin.
        """
        folder = Path(config.trainer.run_dir)
        write_config(folder, config_to_dict(config))
        try:
            self.sinks = [MetricsFile(folder, step), TensorBoard(folder, step)]
            if config.trainer.wandb_project is not None:
                self.sinks.append(WeightsAndBiases(config))
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: a file in {folder} can't be read and written: {error}; make it so, or set another"
            ) from error
        self.line = LiveLine(step, last_step)
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

    def show_step(self, step: int, loss: float | None) -> None:
        """Moves the live line on to a step, with its loss if that is known."""
        if self.line is not None:
            self.line.advance(step, loss)

    def show_save(self) -> None:
        """Shows in the live line that a snapshot has been saved now."""
        if self.line is not None:
            self.line.saved_at = time.monotonic()

    def show_evaluation(self, done: float | None) -> None:
        """Shows in the live line which part of an evaluation is done; None: it has ended."""
        if self.line is not None:
            self.line.show_evaluation(done)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.sinks = []
        self.line = None


def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Writes config.yaml, complete or not at all however the process ends; raises a UserError if that fails."""
    try:
        replace_file(run_dir / "config.yaml", dump_config(config))
    except OSError as error:
        raise UserError(
            f"trainer.run_dir: {run_dir}/config.yaml can't be written: {error.strerror}; make it writable, or "
            "set another"
        ) from error


class MetricsFile:
    """metrics.jsonl. Rows of later steps than `step`, and a torn last row, are removed from the file.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        file = folder / "metrics.jsonl"
        if file.exists():
            with replaced_file(file) as kept:
                for row in iter_metrics(file):
                    if row is not None and row["step"] <= step:
                        kept.write(json.dumps(row).encode() + b"\n")
        self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Appends a row by a single write, so that a kill leaves at most one torn row, the last."""
        line = json.dumps({"event": event, "step": step, "time": time.time(), **values}).encode() + b"\n"
        size = os.fstat(self.descriptor).st_size
        if os.write(self.descriptor, line) < len(line):
            os.ftruncate(self.descriptor, size)  # or the next row would be lost with the torn one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self.descriptor)


class TensorBoard:
    """TensorBoard's events, which hide later steps of earlier files.

    After an error, the next row begins another file: an error ends the thread of a SummaryWriter, and may leave a torn
    record, behind which TensorBoard reads nothing.

    Raises:
        OSError: the events can't be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.writer: Any = None
        threading.excepthook = _show_thread_error
        self._open(purge_step=step + 1)

    def _open(self, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow, and plot.py needs no PyTorch

        # TensorBoard reads files in the order of their names, which begin with the time. A file of the same second, or
        # of a clock that was ahead, might be read after the new one.
        earlier = f"events.out.tfevents.{time.time() - 2:.0f}"
        for file in sorted(self.folder.glob("events.out.tfevents.*")):
            if file.name > earlier:
                file.rename(self.folder / f"{earlier}.{file.name}")
        self.writer = SummaryWriter(self.folder, purge_step=purge_step)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if event not in ("train", "eval", "sample"):
            return
        if self.writer is None:
            self._open()
        try:
            for name, value in values.items():
                if event == "sample":
                    self.writer.add_text("sample", indent(value, "    "), step)  # verbatim, in Markdown
                else:
                    self.writer.add_scalar(name, value, step)
            self.writer.flush()  # or a kill would lose the rows of two minutes
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()
            self.writer = None


def _show_thread_error(args: threading.ExceptHookArgs) -> None:
    """Shows the traceback of a thread, except that of a SummaryWriter, whose `flush` raises the error again."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        THREAD_EXCEPTHOOK(args)


class WeightsAndBiases:
    """A run in a project of Weights & Biases.

    The run folder's `wandb_id` has its id, so that a resumed run continues it. Weights & Biases ignores values of steps
    that it already has.

    Raises:
        UserError: wandb refuses to begin, as without an API key.
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
                settings=wandb.Settings(console="off"),  # it would take the live line for output
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
        """Calls wandb, unless it has failed before, as when its own process has ended."""
        if self.has_failed:
            return
        try:
            function()
        except Exception as error:  # of several kinds
            self.has_failed = True
            logger.warning(f"trainer.wandb_project: wandb has failed: {error}; training continues without it")


def check_wandb(project: str | None) -> None:
    """Raises a UserError if there is a project and wandb, which is optional, is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"trainer.wandb_project is {project}, which needs wandb: run `pip install wandb`, or set the key to null"
        )


class Terminal:
    """Log lines, and the live line where stdout is a terminal, in which train rows have no line of their own."""

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
            # Characters that would move the cursor are replaced.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in values["text"])
            logger.info(f"step {step} writes:\n{indent(shown.strip(), '    ')}")

    def close(self) -> None:
        self.line.close()


class StepTimer:
    """Measures throughput without pauses, from a number of samples on."""

    def __init__(self, samples: int) -> None:
        self.restart(samples)

    def restart(self, samples: int) -> None:
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
        """Excludes the time of its block, such as evaluation, from the time of training."""
        began = time.perf_counter()
        yield
        self.paused += time.perf_counter() - began

    def tokens_per_second(self, samples: int, tokens_per_sample: int) -> float:
        """Returns the average rate since the last call, given the number of samples so far."""
        now = self.training_seconds
        rate = (samples - self.samples) * tokens_per_sample / (now - self.since)
        self.since = now
        self.samples = samples
        return rate


def iter_metrics(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yields each row of a metrics.jsonl, and None for any other line; a torn last one is left out.

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
    """Returns the steps whose snapshots were written, according to a metrics.jsonl, which need not exist."""
    if not file.is_file():
        return []
    rows = filter(None, iter_metrics(file))
    return [row["step"] for row in rows if row["event"] == "snapshot" and "path" in row]
