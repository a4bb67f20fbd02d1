"""What a run says: messages, rows of metrics.jsonl, TensorBoard's events and the live line."""

import json
import math
import platform
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mingpt.config import PLACES, Config
from mingpt.corpus import Corpus
from mingpt.distributed.process_group import DistributedContext
from mingpt.errors import UserError
from mingpt.files import write_config
from mingpt.hardware.device import device_name
from mingpt.hardware.numerics import Numerics
from mingpt.monitoring.logging import logger
from mingpt.monitoring.metrics import MetricsLogger, NullMetricsLogger, StepTimer
from mingpt.monitoring.progress import format_duration
from mingpt.monitoring.wandb_run import WandbRun
from mingpt.optimizer import learning_rate
from mingpt.parallel.memory import MemoryUsage, format_bytes, measure_memory
from mingpt.parallel.strategy import Strategy
from mingpt.signals import EXIT_STATUS
from mingpt.snapshot.manager import SaveResult, SnapshotManager, new_run_advice


class StepResult(NamedTuple):
    """What `Trainer.train_step` returns; tensors are on the device."""

    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float


class _Trainer(Protocol):
    """What a report reads of a trainer, which it does not change."""

    config: Config
    config_dict: dict[str, Any]
    context: DistributedContext
    run_dir: Path
    corpus: Corpus
    train_data: Any
    val_data: Any
    model_config: Any
    strategy: Strategy
    numerics: Numerics
    snapshots: SnapshotManager
    resumed: dict[str, Any] | None
    step: int
    samples: int
    stop_signal: int
    val_loss: float
    lacks_evaluation: bool

    @property
    def last_step(self) -> int: ...


class Report:
    """What a run says. Ranks other than 0 write no files, and log warnings and errors only.

    Attributes:
        timer: measures speed, without pauses
    """

    def __init__(self, trainer: _Trainer, model: nn.Module) -> None:
        self.trainer = trainer
        self.model_text = model_summary(model)
        self.metrics: MetricsLogger = NullMetricsLogger()
        self.timer = StepTimer(trainer.samples)
        self.epoch = trainer.samples // len(trainer.train_data)
        self.memory: MemoryUsage | None = None  # measured in the first step
        self.speed = 0.0  # tokens per second, as last measured
        self.evaluation_began = 0.0
        self.evaluation_seconds = 0.0  # that the newest evaluation took

    # The start

    def start(self) -> None:
        """Shows what is about to be trained, on which device of each rank, and opens the files."""
        context = self.trainer.context
        self.show_start(context.all_gather_object(self.device_of_this_rank()))
        with context.shared_errors():
            if context.rank == 0:
                self.open_files(self.trainer.step)
                self.start_row()
        self.timer = StepTimer(self.trainer.samples)

    def device_of_this_rank(self) -> str:
        return f"{platform.node()} {device_name(self.trainer.context.device)}"

    def show_start(self, devices: Sequence[str]) -> None:
        """Logs the summary of the run.

        Args:
            devices: host and device of each rank
        """
        trainer = self.trainer
        config = trainer.config
        facts = {"backend": trainer.context.backend, **trainer.numerics.reasons, **trainer.strategy.description}
        if len(trainer.val_data) < trainer.val_data.windows_in_text:
            facts["evaluation"] = (
                f"{len(trainer.val_data):,} of the {trainer.val_data.windows_in_text:,} windows of the validation "
                "text, evenly spread"
            )
        characters = len(trainer.corpus.tokens)
        vocab_size = len(trainer.corpus.vocabulary)
        windows = len(trainer.train_data)
        logger.info(run_summary(config, devices, facts, characters, vocab_size, windows, trainer.last_step))
        logger.info(self.model_text)
        if trainer.resumed is not None:
            file = trainer.snapshots.storage.file(trainer.step)
            hardware = trainer.numerics.choices["hardware"]
            lr = learning_rate(trainer.step, trainer.last_step, config.optimizer)
            for line in resume_summary(trainer.resumed, trainer.config_dict, file, trainer.corpus.sha256, hardware, lr):
                logger.info(line)
            if config.trainer.init_from not in (None, trainer.config_dict["trainer"]["init_from"]):
                logger.warning(f"trainer.init_from is not used, since the run continues from {file}")

    def open_files(self, step: int) -> None:
        """Writes config.yaml, and opens the metrics without rows of later steps than `step`."""
        trainer = self.trainer
        write_config(trainer.run_dir, trainer.config_dict)
        tracker = None
        if trainer.config.trainer.wandb_project is not None:
            tracker = WandbRun(trainer.config.trainer.wandb_project, trainer.run_dir, trainer.config_dict)
        self.metrics = MetricsLogger(trainer.run_dir, step, trainer.last_step, tracker)

    def start_row(self) -> None:
        self.metrics.log("start", self.trainer.step, samples=self.trainer.samples, **self.trainer.numerics.choices)

    def already_trained(self) -> None:
        """Says that there is nothing to do."""
        trainer = self.trainer
        file = trainer.snapshots.storage.file(trainer.step)
        logger.info(
            f"already trained: {file} is at step {trainer.step}, and training ends at step {trainer.last_step}. To "
            f"continue, raise trainer.max_steps or trainer.max_epochs; to start a new run, "
            f"{new_run_advice(trainer.config_dict)}.\n{next_commands(file, str(trainer.run_dir))}"
        )

    # After a step

    @property
    def shows_every_loss(self) -> bool:
        """Whether the loss of this step is shown in the live line: it is free on one process's CPU, or the first."""
        context = self.trainer.context
        return self.memory is None or (context.device.type == "cpu" and context.world_size == 1)

    def measure_speed(self) -> None:
        self.speed = self.timer.tokens_per_second(self.trainer.samples, self.trainer.train_data.block_size)

    def step(self, result: StepResult, mean_loss: float, logs: bool) -> None:
        """Shows a finished step, and writes its row if `logs`.

        Args:
            result: what `train_step` returned
            mean_loss: nan if it was not read
        """
        trainer = self.trainer
        self.metrics.advance(trainer.step, mean_loss)
        if logs:
            self.metrics.log_train(
                trainer.step,
                loss=mean_loss,
                learning_rate=result.learning_rate,
                grad_norm=result.grad_norm.item(),
                tokens_per_second=self.speed,
                **trainer.context.metrics(),
            )
        if self.memory is None:
            self._show_memory()
        epoch = trainer.samples // len(trainer.train_data)
        if epoch > self.epoch:
            logger.info(f"step {trainer.step}: epoch {epoch} is over ({len(trainer.train_data):,} windows)")
        self.epoch = epoch

    def _show_memory(self) -> None:
        trainer = self.trainer
        self.memory = measure_memory(trainer.strategy)
        usage = self.memory
        if trainer.strategy.is_sharded:  # replicas hold the same
            usages = [MemoryUsage(**values) for values in trainer.context.all_gather_object(asdict(usage))]
            usage = max(usages, key=lambda each: each.total)
        peak = ""
        if trainer.context.device.type == "cuda":
            peak = f"; at the peak {format_bytes(torch.cuda.max_memory_allocated())}, activations included"
        logger.info(f"memory measured, on the rank with most: {usage}{peak}")

    def show_evaluation(self, done: float | None) -> None:
        """Shows which part of an evaluation is done: 0 at its beginning; None: it has ended."""
        now = time.perf_counter()
        if done == 0:
            self.evaluation_began = now
        if done is None:
            self.evaluation_seconds = now - self.evaluation_began
        self.metrics.show_evaluation(done)

    def evaluation(self, val_loss: float) -> None:
        """Writes and shows the result of an evaluation that has just been made."""
        self.metrics.log_eval(self.trainer.step, val_loss, self.evaluation_seconds)

    def sample(self, text: str) -> None:
        self.metrics.log_sample(self.trainer.step, text)

    def saves(self, results: Sequence[SaveResult]) -> None:
        """Writes and shows saves that have ended since the last call."""
        for result in results:
            if result.is_saved:
                path = self.trainer.snapshots.storage.file(result.step)
                self.metrics.log_snapshot(result.step, path=path, val_loss=result.val_loss)
            else:
                self.metrics.log_snapshot(result.step, error=str(result.error))
            if result.error is not None:
                logger.warning(f"step {result.step}: {result.error}; training continues, and the next save tries again")

    # The end

    def finish(self, save_errors: Mapping[int, str]) -> int:
        """Says how the run has ended; returns the exit status.

        Args:
            save_errors: why the last snapshot is not saved, by rank; empty strings where it is

        Raises:
            UserError: it is not saved.
        """
        trainer = self.trainer
        stop_signal = 0
        signal_name = None
        if trainer.step < trainer.last_step or trainer.lacks_evaluation:
            stop_signal = trainer.stop_signal
            signal_name = signal.Signals(stop_signal).name
        self.metrics.log("stop", trainer.step, signal=signal_name)
        errors = [error for error in save_errors.values() if error]
        if errors:
            raise UserError(
                f"training has reached step {trainer.step}, but its snapshot is not saved: {errors[0]}; then the same "
                "command resumes from the newest"
            )
        if stop_signal:
            logger.info(f"stopped by {signal_name} at step {trainer.step}, and saved; the same command resumes")
            return EXIT_STATUS[signal.Signals(stop_signal)]
        file = trainer.snapshots.storage.file(trainer.step)
        text = f"done in {format_duration(self.timer.elapsed)}: validation loss {trainer.val_loss:.4f}, snapshot {file}"
        best = trainer.snapshots.best
        if best["step"] not in (None, trainer.step):
            folder = shlex.quote(file.rpartition("/")[0])
            text += (
                f"\nbest:       validation loss {best['val_loss']:.4f} at step {best['step']}: "
                f"python sample.py --snapshot {folder} --best"
            )
        logger.info(f"{text}\n{next_commands(file, str(trainer.run_dir))}")
        return 0

    def close(self) -> None:
        self.metrics.close()


def model_summary(model: nn.Module) -> str:
    """The layers of a model with their parameters, and the total in parameters and bytes."""
    rows: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = ".".join("*" if part.isdigit() else part for part in parts[:-1])
        rows.setdefault(layer, [0, 0])
        rows[layer][0] += parameter.numel()
        rows[layer][1] += parameter.numel() * parameter.element_size()
    rows["total"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [f"  {'layer':<28}{'parameters':>14}{'bytes':>16}"]
    lines += [f"  {layer:<28}{parameters:>14,}{size:>16,}" for layer, (parameters, size) in rows.items()]
    return "\n".join(lines)


def run_summary(
    config: Config,
    members: Sequence[str],
    facts: Mapping[str, str],
    characters: int,
    vocab_size: int,
    windows: int,
    last_step: int,
) -> str:
    """Ranks, choices, text and length of a run.

    Args:
        members: host and device of each rank
        facts: rows such as backend and precision
        characters: length of the text
        windows: per epoch
    """
    cfg = config.trainer
    T = config.data.block_size
    epochs = last_step * cfg.batch_size / windows
    ranks = [f"GLOBAL_RANK: {i}, MEMBER: {i + 1}/{len(members)}  {member}" for i, member in enumerate(members)]
    rows = {
        **facts,
        "text": f"{config.data.path}: {characters:,} characters, {vocab_size} distinct; {windows:,} training windows",
        "batch": f"{cfg.batch_size} sequences x {T} characters, over all ranks",
        "length": f"{last_step:,} steps = {epochs:.2f} epochs",
        "run": f"{cfg.run_dir}, a snapshot every {cfg.save_every} steps: kill it at any time, the same command resumes "
        "from the newest",
    }
    return "\n".join(ranks + [f"{name:<10} {text}" for name, text in rows.items()])


def resume_summary(
    header: Mapping[str, Any],
    config: Mapping[str, Mapping[str, Any]],
    file: str,
    text_sha256: str,
    hardware: str,
    learning_rate: float,
) -> Iterator[str]:
    """Lines that name the snapshot's file, and what has changed in this run since it was saved."""
    yield f"resuming from {file}"
    changes = changed_keys(header["config"], config)
    if changes:
        yield f"changed since the snapshot: {', '.join(changes)}"
    if (then := header["text_sha256"]) != text_sha256:
        yield f"the text has changed: its SHA-256 is {then} in the snapshot, {text_sha256} now"
    if (then := header["choices"].get("hardware")) != hardware:
        yield f"the hardware has changed: {then} made the snapshot, {hardware} resumes it, and last bits may differ"
    if not math.isclose(then := header["learning_rate"], learning_rate, rel_tol=1e-6):
        yield f"the learning rate of step {header['step']} was {then:.3g}, by the yaml it is now {learning_rate:.3g}"


def changed_keys(then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Each key of the configuration, except for places, whose value has changed: `trainer.batch_size 12 -> 8`."""
    changes = []
    for section, keys in now.items():
        for key, value in keys.items():
            before = then[section].get(key, value)  # an older snapshot may lack a key
            if before != value and f"{section}.{key}" not in PLACES:
                changes.append(f"{section}.{key} {format_value(before)} -> {format_value(value)}")
    return changes


def format_value(value: Any) -> str:
    """A value of the configuration as in the yaml."""
    return json.dumps(value).strip('"')


def next_commands(snapshot: str, run_dir: str) -> str:
    """Commands to try on a finished run."""
    snapshot = shlex.quote(snapshot)
    return (
        f"to sample:  python sample.py --snapshot {snapshot}\n"
        f"to plot:    python plot.py {shlex.quote(run_dir)}\n"
        f"to export:  python export.py --snapshot {snapshot} --out FOLDER"
    )
