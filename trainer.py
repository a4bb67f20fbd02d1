"""The training loop: steps, evaluation, snapshots and stops.

Progress is two integers, step and samples. Sample order, dropout and learning rate are functions of (seed, step, sample
number), so a run that resumes from a snapshot is the same run.
"""

import math
import os
import platform
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from char_dataset import CharDataset, ValidationDataset, train_val_split
from mingpt.config import Config, GPTConfig, config_to_dict
from mingpt.corpus import encode_corpus
from mingpt.distributed.process_group import DistributedContext
from mingpt.evaluation import choose_sample_prompt, evaluate, generate_sample
from mingpt.optimizer import learning_rate
from mingpt.parallel.memory import MemoryUsage, format_bytes, measure_memory
from mingpt.parallel.strategies import build_strategy, strategy_class, validate
from mingpt.snapshot.manager import SnapshotManager, check_compatible
from mingpt.snapshot.pretrained import load_initial_weights, load_pretrained
from mingpt.utils.device import device_name
from mingpt.utils.errors import UserError
from mingpt.utils.files import lock_run_dir, write_config
from mingpt.utils.logging import logger
from mingpt.utils.metrics import MetricsLogger, NullMetricsLogger, StepTimer
from mingpt.utils.numerics import choose_numerics
from mingpt.utils.profiler import profile_steps
from mingpt.utils.progress import format_duration
from mingpt.utils.signals import EXIT_STATUS, SignalHandler
from mingpt.utils.summary import model_summary, next_commands, resume_summary, run_summary
from model import GPT

EXIT_WAIT_SECONDS = 5.0  # how long a failing run waits for a snapshot that is being written


class StepResult(NamedTuple):
    """What `train_step` returns; tensors are on the device."""

    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float


class Trainer:
    """One run on one rank, new or resumed from its newest snapshot.

    Attributes:
        step, samples: finished optimizer steps, and the sequences in them

    Raises:
        UserError: text, folders or the snapshot do not fit the configuration.
    """

    def __init__(self, config: Config, context: DistributedContext) -> None:
        self.config, self.context, cfg = config, context, config.trainer
        self.config_dict = config_to_dict(config)
        self.run_dir = Path(cfg.run_dir)
        validate(config, context.world_size)
        self._load_data()
        path = cfg.snapshot_path or str(self.run_dir / "snapshots")
        self.snapshots = SnapshotManager(context, path, cfg.keep_snapshots, config.distributed.timeout_seconds)
        self.resumed = self.snapshots.load_newest()
        header = self.resumed or {"step": 0, "samples": 0, "choices": {}}
        if self.resumed:
            check_compatible(self.resumed, self.config_dict, self.corpus.vocabulary)
        self.step, self.samples = header["step"], header["samples"]
        self._build_strategy(header["choices"])
        self.last_step = self._last_step()
        self.memory: MemoryUsage | None = None  # measured in the first step
        self.bad_step = torch.zeros((), device=self.strategy.device)  # the first step with a non-finite gradient
        self._log_start()

    def train(self) -> int:
        """Trains to the last step, or until a signal stops it. Returns the exit status.

        Raises:
            UserError: a loss is not finite, or a file can't be written.
        """
        if self.resumed and self.step >= self.last_step:
            file = self.snapshots.storage.file(self.step)
            logger.info(
                f"already trained: {file} is at step {self.step}, and training ends "
                f"at step {self.last_step}. To continue, raise trainer.max_steps or trainer.max_epochs; to start a new "
                f"run, set another trainer.run_dir.\n{next_commands(file, str(self.run_dir))}"
            )
            self.context.end_collectives()
            self.snapshots.writer.wait()
            return 0
        self.context.run_on_rank0(lambda: write_config(self.run_dir, self.config_dict))
        metrics = self.context.raise_on_all_ranks(self._open_metrics)
        trace = self.run_dir / f"trace-{self.context.rank}.json"
        with (
            closing(metrics),
            profile_steps(self.config.trainer.profile_steps, trace) as profiler_step,
            SignalHandler() as signals,
        ):
            try:
                return self.train_loop(metrics, signals, profiler_step)
            finally:
                self.snapshots.writer.wait(EXIT_WAIT_SECONDS)

    def train_loop(self, metrics: MetricsLogger, signals: SignalHandler, after_step: Callable[[], None]) -> int:
        """Steps, each followed by whatever is due. All ranks stop after the same step, agreed on during the step."""
        save_seconds = 60 * (self.config.trainer.save_minutes or math.inf)
        self.saved_at, self.val_loss, stop_signal = time.monotonic(), math.nan, 0
        self.timer, self.first_step = StepTimer(self.samples), self.step + 1
        while self.step < self.last_step and not stop_signal:
            overdue = self.context.rank == 0 and time.monotonic() > self.saved_at + save_seconds
            votes = self.context.all_reduce_max_async(signals.signal, int(overdue))
            epoch = self.samples // len(self.train_data)
            result = self.train_step()
            stop_signal, save_now = votes()
            self._after_step(metrics, result, bool(stop_signal), bool(save_now))
            if self.samples // len(self.train_data) > epoch:
                logger.info(f"step {self.step}: epoch {epoch + 1} is over ({len(self.train_data):,} windows)")
            if self.step == self.first_step:
                self._log_memory()
            after_step()
        return self._finish(metrics, stop_signal if self.step < self.last_step else 0)

    def train_step(self) -> StepResult:
        """One optimizer step: forward and backward of all micro-batches, clipping, and the update."""
        cfg, strategy, batch_size = self.config.optimizer, self.strategy, self.config.trainer.batch_size
        if self.total_samples:
            batch_size = min(batch_size, self.total_samples - self.samples)
        losses = strategy.forward_backward(range(self.samples, self.samples + batch_size), self.train_data)
        strategy.scaler.unscale_(strategy.optimizer)
        grad_norm = strategy.clip_grad_norm_(cfg.grad_norm_clip)
        self.step += 1
        self.samples += batch_size
        lr = learning_rate(self.step, self.last_step, cfg)
        for group in strategy.optimizer.param_groups:
            group["lr"] = lr
        if not strategy.scaler.is_enabled():
            self._skip_non_finite(grad_norm)
        strategy.scaler.step(strategy.optimizer)
        strategy.scaler.update()
        if self.memory is None:
            self.memory = measure_memory(strategy.parameters.values(), strategy.local_optimizer)
        strategy.optimizer.zero_grad(set_to_none=True)
        return StepResult(losses, grad_norm, lr)

    def _skip_non_finite(self, grad_norm: Tensor) -> None:
        """Makes the optimizer skip this and all later updates once a gradient is not finite.

        Fused kernels, except MPS's, read GradScaler's `found_inf`, so nothing waits. All ranks have the same norm.
        """
        is_first = (self.bad_step == 0) & ~grad_norm.isfinite()
        self.bad_step = torch.where(is_first, self.step, self.bad_step)
        self.strategy.local_optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.strategy.local_optimizer.found_inf = (self.bad_step > 0).float()  # type: ignore[attr-defined]
        if self.context.device.type == "mps":  # where nothing would be skipped
            self._check_finite()

    def _after_step(self, metrics: MetricsLogger, result: StepResult, stops: bool, save_now: bool) -> None:
        cfg = self.config.trainer
        log, evaluates, save = map(self._is_due, (cfg.log_every, cfg.eval_every, cfg.save_every))
        save = save or save_now or stops
        if self.context.device.type == "cpu" or log or evaluates or save:
            self._check_finite()
        # On one process's CPU, reading the loss waits for nothing.
        is_free = self.context.device.type == "cpu" and self.context.world_size == 1
        reads_loss = log or is_free or self.step == self.first_step
        mean_loss = self.strategy.mean_loss(result.losses).item() if reads_loss else math.nan
        metrics.advance(self.step, mean_loss)
        if log:
            self._check_finite(mean_loss)
            metrics.log_train(
                self.step,
                loss=mean_loss,
                learning_rate=result.learning_rate,
                grad_norm=result.grad_norm.item(),
                tokens_per_second=self.timer.tokens_per_second(self.samples, self.train_data.block_size),
                world_size=self.context.world_size,
                restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        with self.timer.pause():
            val_loss = None
            if evaluates:
                began = time.perf_counter()
                val_loss = evaluate(self.strategy, self.val_data, cfg.micro_batch_size or cfg.batch_size)
                self.val_loss = val_loss
                metrics.log_eval(self.step, val_loss, time.perf_counter() - began)
            if cfg.sample_every is not None and self._is_due(cfg.sample_every):
                sample = generate_sample(self.strategy, self.corpus.vocabulary, self.sample_prompt, cfg.seed)
                metrics.log_sample(self.step, sample)
            if save:
                self.save_snapshot(val_loss, is_last=stops or self.step == self.last_step)
                self.saved_at = time.monotonic()
            self._log_saves(metrics)

    def _finish(self, metrics: MetricsLogger, stop_signal: int) -> int:
        """Waits for the last snapshot on all ranks; returns the exit status."""
        self.context.end_collectives()
        self.snapshots.writer.wait()
        self._log_saves(metrics)
        # Ranks exit together: if one exits, torchrun ends the others, which may still be writing.
        errors = self.context.exchange_messages(self.snapshots.writer_ranks, self.snapshots.last_error)
        signal_name = signal.Signals(stop_signal).name if stop_signal else None
        metrics.log("stop", self.step, signal=signal_name)
        if any(errors.values()):
            raise UserError(
                f"training has reached step {self.step}, but its snapshot is not saved: "
                f"{next(filter(None, errors.values()))}; then the same command resumes from the newest"
            )
        if stop_signal:
            logger.info(f"stopped by {signal_name} at step {self.step}, and saved; the same command resumes")
            return EXIT_STATUS[signal.Signals(stop_signal)]
        file = self.snapshots.storage.file(self.step)
        logger.info(
            f"done in {format_duration(self.timer.elapsed)}: validation loss {self.val_loss:.4f}, snapshot {file}\n"
            f"{next_commands(file, str(self.run_dir))}"
        )
        return 0

    def save_snapshot(self, val_loss: float | None, is_last: bool) -> None:
        """Starts to save a snapshot of this step; `is_last` says that the run ends with it."""
        header = {
            "step": self.step,
            "samples": self.samples,
            "config": self.config_dict,
            "vocabulary": self.corpus.vocabulary,
            "val_loss": val_loss,
            "choices": self.numerics.choices,
            "learning_rate": self.strategy.optimizer.param_groups[0]["lr"],
            "text_sha256": self.corpus.sha256,
        }
        self.snapshots.save(header, self.strategy, is_last)

    def _check_finite(self, mean_loss: float = 0.0) -> None:
        bad_step = int(self.bad_step) if math.isfinite(mean_loss) else self.step
        if bad_step:
            storage, cfg = self.snapshots.storage, self.config.optimizer
            steps = storage.steps() if self.context.rank == 0 else []
            newest = storage.file(steps[-1]) if steps else "none yet"
            raise UserError(
                f"step {bad_step}: the loss is not finite; no weight and no snapshot was changed by it. "
                f"Newest snapshot: {newest}. Lower optimizer.learning_rate ({cfg.learning_rate:g}) or "
                f"optimizer.grad_norm_clip ({cfg.grad_norm_clip or 'null'})"
            )

    def _load_data(self) -> None:
        cfg, init_from = self.config.trainer, self.config.trainer.init_from or ""
        extra = (lambda: load_pretrained(init_from, "trainer.init_from", GPT).vocabulary) if init_from else None
        self.corpus = self.context.local_rank0_first(
            lambda: encode_corpus(self.config.data.path, self.run_dir / "cache", extra, init_from)
        )
        self.context.check_equal({"the text's SHA-256": self.corpus.sha256})
        self.context.raise_on_all_ranks(lambda: lock_run_dir(self.run_dir, self) if self.context.rank == 0 else None)
        training, validation = train_val_split(self.corpus, self.config.data)
        self.train_data = CharDataset(training, self.config.data.block_size, cfg.seed)
        self.val_data = ValidationDataset(validation, self.config.data.block_size)
        self.sample_prompt = choose_sample_prompt(cfg.sample_prompt, validation, self.corpus.vocabulary)
        self.total_samples = (cfg.max_epochs or 0) * len(self.train_data)  # 0: no limit

    def _build_strategy(self, previous_choices: dict[str, Any]) -> None:
        config, context, vocab_size = self.config, self.context, len(self.corpus.vocabulary)
        one_thread, sizes = strategy_class(config).needs_one_thread, (context.world_size, context.local_world_size)
        self.numerics = context.raise_on_all_ranks(
            lambda: choose_numerics(config.trainer, context.device, *sizes, one_thread, previous_choices)
        )
        context.check_equal({"what trainer.precision: auto gives": self.numerics.precision}, advice="set it to either")
        self.model_config = GPTConfig(**asdict(config.model), vocab_size=vocab_size, block_size=config.data.block_size)
        with torch.device("meta"):  # the full model need not fit into memory
            model = GPT(self.model_config)
        self.strategy = build_strategy(config, model, context, self.numerics.precision, self.train_data[[0]])
        if self.resumed:
            self.snapshots.restore(self.resumed, self.strategy)
        else:
            weights = context.raise_on_all_ranks(lambda: self._initial_weights() if context.rank == 0 else {})
            self.strategy.load_full_state(weights, {}, 0)

    def _initial_weights(self) -> dict[str, Tensor]:
        torch.manual_seed(self.config.trainer.seed)
        model, path = GPT(self.model_config), self.config.trainer.init_from
        return model.state_dict() if path is None else load_initial_weights(path, model, self.corpus.vocabulary)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.last_step

    def _last_step(self) -> int:
        """The step at which max_steps or max_epochs is reached."""
        cfg = self.config.trainer
        ends = [] if cfg.max_steps is None else [cfg.max_steps]
        if self.total_samples:
            ends.append(self.step + max(0, -(-(self.total_samples - self.samples) // cfg.batch_size)))
        return min(ends)

    def _open_metrics(self) -> MetricsLogger:
        if self.context.rank:
            return NullMetricsLogger()
        metrics = MetricsLogger(self.run_dir, self.step, self.last_step)
        metrics.log("start", self.step, samples=self.samples, **self.numerics.choices)
        return metrics

    def _log_start(self) -> None:
        config, context = self.config, self.context
        members = context.all_gather_object(f"{platform.node()} {device_name(context.device)}")
        facts = {"backend": context.backend, **self.numerics.reasons, **self.strategy.description}
        sizes = (len(self.corpus.tokens), len(self.corpus.vocabulary))
        logger.info(run_summary(config, members, facts, *sizes, len(self.train_data), self.last_step))
        with torch.device("meta"):
            logger.info(model_summary(GPT(self.model_config)))
        if self.resumed:
            file, hardware = self.snapshots.storage.file(self.step), self.numerics.choices["hardware"]
            lr = learning_rate(self.step, self.last_step, config.optimizer)
            for line in resume_summary(self.resumed, file, self.corpus.sha256, hardware, lr):
                logger.info(line)

    def _log_saves(self, metrics: MetricsLogger) -> None:
        for result in self.snapshots.poll():
            if result.is_saved:
                path = self.snapshots.storage.file(result.step)
                metrics.log_snapshot(result.step, path=path, val_loss=result.val_loss)
            else:
                metrics.log_snapshot(result.step, error=str(result.error))
            if result.error is not None:
                logger.warning(f"step {result.step}: {result.error}; training continues, and the next save tries again")

    def _log_memory(self) -> None:
        usage = max(self.context.all_gather_object(self.memory), key=lambda memory: memory.total)  # type: ignore[union-attr]
        cuda = self.context.device.type == "cuda"
        peak = f"; at the peak {format_bytes(torch.cuda.max_memory_allocated())}, activations included" if cuda else ""
        logger.info(f"memory measured, on the rank with most: {usage}{peak}")
