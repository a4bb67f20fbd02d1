"""The training loop: steps, evaluation, snapshots and stops.

Progress is two integers, step and samples. Sample order, dropout and learning rate are functions of (seed, step, sample
number), so a run that resumes from a snapshot is the same run.
"""

import math
import os
import platform
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from char_dataset import CharDataset, ValidationDataset, train_val_split
from mingpt.config import Config, GPTConfig, config_to_dict
from mingpt.corpus import check_text, encode_corpus
from mingpt.distributed.process_group import DistributedContext
from mingpt.evaluation import Evaluation, choose_sample_prompt, generate_sample
from mingpt.optimizer import learning_rate
from mingpt.parallel.catch_up import Progress, catch_up
from mingpt.parallel.memory import MemoryUsage, format_bytes, measure_memory
from mingpt.parallel.strategies import build_strategy, strategy_class, validate
from mingpt.snapshot.manager import SnapshotManager, check_compatible, new_run_advice
from mingpt.snapshot.pretrained import load_initial_weights, load_pretrained
from mingpt.utils.device import device_name
from mingpt.utils.errors import MembershipChanged, UserError
from mingpt.utils.files import write_config
from mingpt.utils.lock import lock_run
from mingpt.utils.logging import logger
from mingpt.utils.metrics import MetricsLogger, NullMetricsLogger, StepTimer, saved_steps
from mingpt.utils.numerics import choose_numerics
from mingpt.utils.profiler import profile_steps
from mingpt.utils.progress import format_duration
from mingpt.utils.signals import EXIT_STATUS, SignalHandler
from mingpt.utils.summary import model_summary, next_commands, resume_summary, run_summary
from model import GPT

if TYPE_CHECKING:
    from mingpt.distributed.membership import View

MIN_LOSS_SCALE = 1e-4  # of GradScaler, which halves its scale after each overflow; as in fairseq
EXIT_WAIT_SECONDS = 5.0  # how long a failing run waits for a snapshot that is being written


class StepResult(NamedTuple):
    """What `train_step` returns; tensors are on the device."""

    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float


class Trainer:
    """One run on one rank, new or resumed from its newest snapshot.

    Attributes:
        step, samples: finished optimizer steps, and the sequences in them; step -1: this rank has no state yet, and
            gets it from another
        settled: the newest step whose metrics are written, with all else that is due after it
        lacks_evaluation: a stop has broken off the evaluation of the newest step; the next start makes up for it

    Raises:
        UserError: text, folders or the snapshot do not fit the configuration.
    """

    def __init__(self, config: Config, context: DistributedContext) -> None:
        self.config, self.context, cfg = config, context, config.trainer
        self.config_dict = config_to_dict(config)
        self.run_dir = Path(cfg.run_dir)
        context.local_rank0_first(lambda: validate(config, context.launch_world_size))
        self._load_data()
        path = str(self.run_dir / "snapshots") if cfg.snapshot_path is None else cfg.snapshot_path
        self.snapshots = SnapshotManager(context, path, cfg.keep_snapshots, config.distributed.timeout_seconds)
        self.resumed = None if context.is_joining else self.snapshots.load_newest()
        header = self.resumed or {"step": -int(context.is_joining), "samples": 0, "choices": {}}
        if self.resumed:
            check_compatible(self.resumed, self.config_dict, self.corpus.vocabulary)
        elif not context.is_joining:
            context.raise_on_all_ranks(self._check_new)
        self.step, self.samples = header["step"], header["samples"]
        self._build_strategy(context.first_value("choices", header["choices"]))
        self.memory: MemoryUsage | None = None  # measured in the first step
        self.bad_step = torch.zeros((), device=self.strategy.device)  # the first step with a non-finite gradient
        self.metrics: MetricsLogger = NullMetricsLogger()
        self.result: StepResult | None = None  # of the newest step
        self.settled, self.first_step, self.epoch = self.step, self.step + 1, self.samples // len(self.train_data)
        self.val_loss, self.stop_signal = math.nan, 0
        self.lacks_evaluation = bool(self.resumed) and self._was_evaluation_broken_off()
        self.save_errors: dict[int, str] = {}  # by rank, of the last snapshot

    def train(self) -> int:
        """Trains to the last step, or until a signal stops it. Returns the exit status.

        Raises:
            UserError: a loss is not finite, or a file can't be written.
        """
        if self.resumed and self.step >= self.last_step and not self.lacks_evaluation:
            file = self.snapshots.storage.file(self.step)
            logger.info(
                f"already trained: {file} is at step {self.step}, and training ends "
                f"at step {self.last_step}. To continue, raise trainer.max_steps or trainer.max_epochs; to start a new "
                f"run, {new_run_advice(self.config_dict)}.\n{next_commands(file, str(self.run_dir))}"
            )
            self.context.end_collectives()
            self.snapshots.writer.wait()
            return 0
        if not self.config.distributed.survive:  # otherwise when it becomes a member
            self._log_start(self.context.all_gather_object(self._describe_device()))
            self.context.raise_on_all_ranks(self._open_files)
        trace = self.run_dir / f"trace-{self.context.launch_rank}.json"
        with profile_steps(self.config.trainer.profile_steps, trace) as profiler_step, SignalHandler() as signals:
            try:
                return self.train_loop(signals, profiler_step)
            finally:
                self.metrics.close()
                self.snapshots.writer.wait(EXIT_WAIT_SECONDS)

    def train_loop(self, signals: SignalHandler, after_step: Callable[[], None]) -> int:
        """Steps, each followed by whatever is due. All ranks stop after the same step, agreed on during the step."""
        self.signals, self.timer = signals, StepTimer(self.samples)
        self._schedule_save()
        while (self.settled < self.last_step or self.lacks_evaluation) and not self.stop_signal:
            try:
                if self.lacks_evaluation:
                    self._make_up_evaluation()
                    continue
                if self.step == self.settled:
                    self.vote = self._start_vote()
                    self.result = self.train_step()
                self.settle()
                after_step()
            except MembershipChanged:
                self._regroup()
        return self._finish()

    def _schedule_save(self) -> None:
        self.overdue_at = time.monotonic() + 60 * (self.config.trainer.save_minutes or math.inf)

    def _start_vote(self) -> Callable[[], list[int]]:
        """Starts to agree on what a single rank knows: a signal to stop, and that a save is overdue."""
        overdue = self.context.rank == 0 and time.monotonic() > self.overdue_at
        return self.context.all_reduce_max_async(self.signals.signal, int(overdue))

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

    def settle(self) -> None:
        """Writes and shows what is due after a step: metrics, validation loss, a sample, a snapshot."""
        cfg = self.config.trainer
        result: StepResult = self.result  # type: ignore[assignment]
        stop_signal, save_now = self.vote()
        log, evaluates, save = map(self._is_due, (cfg.log_every, cfg.eval_every, cfg.save_every))
        save = save or bool(save_now) or bool(stop_signal) or self.step == self.last_step
        is_first = self.step == self.first_step
        if self.context.device.type == "cpu" or log or evaluates or save:
            self._check_finite()
        # On one process's CPU, reading the loss waits for nothing.
        is_free = self.context.device.type == "cpu" and self.context.world_size == 1
        reads_loss = log or is_free or is_first
        mean_loss = self.strategy.mean_loss(result.losses).item() if reads_loss else math.nan
        if log:
            self._check_finite(mean_loss)
        speed = self.timer.tokens_per_second(self.samples, self.train_data.block_size) if log else 0.0
        with self.timer.pause():
            val_loss = None
            began = time.perf_counter()
            if evaluates:  # before anything is written, since it ends when the membership changes
                val_loss, stop_signal = self._evaluate(stop_signal)
            eval_seconds = time.perf_counter() - began
            is_last = bool(stop_signal) or self.step == self.last_step
            save = save or is_last
            self.metrics.advance(self.step, mean_loss)
            if log:
                self.metrics.log_train(
                    self.step,
                    loss=mean_loss,
                    learning_rate=result.learning_rate,
                    grad_norm=result.grad_norm.item(),
                    tokens_per_second=speed,
                    world_size=self.context.world_size,
                    restart_count=self.context.restart_count,
                    **({} if self.context.view is None else {"view": self.context.view}),
                )
            if val_loss is not None:
                self.metrics.log_eval(self.step, val_loss, eval_seconds)
            if cfg.sample_every is not None and self._is_due(cfg.sample_every):
                sample = generate_sample(self.strategy, self.corpus.vocabulary, self.sample_prompt, cfg.seed)
                self.metrics.log_sample(self.step, sample)
            if save:
                self.save_snapshot(val_loss, is_last)
                self._schedule_save()
            self._log_saves()
        if self.samples // len(self.train_data) > self.epoch:
            logger.info(f"step {self.step}: epoch {self.epoch + 1} is over ({len(self.train_data):,} windows)")
            self.epoch = self.samples // len(self.train_data)
        if is_first:
            self._log_memory()
        if is_last:
            self._wait_for_last_save()
        self.settled, self.stop_signal = self.step, stop_signal
        self.lacks_evaluation = evaluates and val_loss is None

    def _evaluate(self, stop_signal: int) -> tuple[float | None, int]:
        """Computes the validation loss, unless a signal stops the run before or meanwhile.

        Returns:
            the loss, None if it was broken off, and the signal or 0; the same on all ranks
        """
        evaluation = Evaluation(
            self.strategy, self.val_data, self.config.trainer.micro_batch_size or self.config.trainer.batch_size
        )
        while not stop_signal and not evaluation.is_done:
            vote = self.context.all_reduce_max_async(self.signals.signal)
            evaluation.advance()
            self.metrics.show_evaluation(evaluation.batches_done / len(evaluation.batches))
            [stop_signal] = vote()
        self.metrics.show_evaluation(None)
        if not evaluation.is_done:
            return None, stop_signal
        self.val_loss = evaluation.mean_loss()
        if not math.isfinite(self.val_loss):
            raise UserError(
                f"step {self.step}: the validation loss is not finite, so its update made weights that are not; no "
                f"snapshot has them. Lower optimizer.learning_rate ({self.config.optimizer.learning_rate:g})"
            )
        return self.val_loss, stop_signal

    def _make_up_evaluation(self) -> None:
        """Evaluates the step that the run has resumed from, and saves it again, with its validation loss."""
        began = time.perf_counter()
        with self.timer.pause():
            val_loss, self.stop_signal = self._evaluate(0)
        if val_loss is not None:
            self.metrics.log_eval(self.step, val_loss, time.perf_counter() - began)
            is_last = self.step == self.last_step
            self.save_snapshot(val_loss, is_last)
            if is_last:
                self._wait_for_last_save()
            self.lacks_evaluation = False

    def _was_evaluation_broken_off(self) -> bool:
        """Whether the snapshot is of a step whose evaluation a signal has broken off."""
        header: dict[str, Any] = self.resumed  # type: ignore[assignment]
        eval_every = header["config"]["trainer"]["eval_every"]
        is_due = self.step % eval_every == 0 or self.step == self.last_step
        return is_due and header["val_loss"] is None

    def _wait_for_last_save(self) -> None:
        """Ranks exit together: if one exits, torchrun ends the others, which may still be writing."""
        self.context.end_collectives()
        self.snapshots.writer.wait()
        self._log_saves()
        self.save_errors = self.context.exchange_messages(self.snapshots.writer_ranks, self.snapshots.last_error)

    def _finish(self) -> int:
        """Reports how the run has ended; returns the exit status."""
        stop_signal = self.stop_signal if self.step < self.last_step or self.lacks_evaluation else 0
        signal_name = signal.Signals(stop_signal).name if stop_signal else None
        self.metrics.log("stop", self.step, signal=signal_name)
        if any(self.save_errors.values()):
            raise UserError(
                f"training has reached step {self.step}, but its snapshot is not saved: "
                f"{next(filter(None, self.save_errors.values()))}; then the same command resumes from the newest"
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

    def _regroup(self) -> None:
        """With distributed.survive: becomes a member of the next view, with the newest state of its members."""
        while True:
            with suppress(MembershipChanged):
                view = self.context.regroup(self.step)  # type: ignore[attr-defined]  # no other context raises it
                self._enter(view)
                return

    def _enter(self, view: "View") -> None:
        if view.steps[self.context.rank] < 0:  # the members go on from their state, whatever this rank has loaded
            self.step, self.result = -1, None
            self.metrics.close()
            self.metrics = NullMetricsLogger()
        device, is_writer = self._describe_device(), self.metrics.is_open
        mine = Progress(
            self.step,
            self.samples,
            self.result,
            self.val_loss,
            self.snapshots.best,
            self.settled,
            self.lacks_evaluation,
            is_writer,
            device,
        )
        now, had = catch_up(self.strategy, mine)
        self.step, self.samples, result, self.val_loss, self.snapshots.best, self.settled, *_ = now
        self.result = result and StepResult(*result)
        self.lacks_evaluation = now.lacks_evaluation
        self.epoch = self.samples // len(self.train_data)
        if mine.step < 0:
            self.timer = StepTimer(self.samples)
        if not had[0].is_writer:
            if self.result is None:
                self._log_start([progress.device for progress in had])
            self._open_files()
            due = self.settled - self.settled % self.config.trainer.save_every
            if self.context.rank == 0 and self.snapshots.is_missing(due):  # the rank that wrote it is gone
                self.overdue_at = -math.inf
        self.metrics.log_view(self.settled, view.number, view.members, view.left, view.joined, view.why)
        if self.step > self.settled:
            self.vote = self._start_vote()

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
        scaler = self.strategy.scaler
        if scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
            raise UserError(
                f"step {self.step}: in fp16, the gradients have overflowed at every loss scale down to "
                f"{MIN_LOSS_SCALE:g}, and the weights no longer change: lower optimizer.learning_rate, or set "
                "trainer.precision to bf16 or fp32"
            )
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
        self.context.local_rank0_first(lambda: check_text(self.config.data.path))  # before a folder is made
        if not self.config.distributed.survive:  # otherwise the supervisor of rank 0 has locked the folders
            self.context.raise_on_all_ranks(self._lock_folders)
        cfg, init_from = self.config.trainer, self.config.trainer.init_from or ""
        extra = (lambda: load_pretrained(init_from, "trainer.init_from", GPT).vocabulary) if init_from else None
        self.corpus = self.context.local_rank0_first(
            lambda: encode_corpus(
                self.config.data.path, self.run_dir / "cache", extra, init_from, verify=self.context.local_rank == 0
            )
        )
        self.context.check_equal({"the text's SHA-256": self.corpus.sha256})
        training, validation = train_val_split(self.corpus, self.config.data)
        self.train_data = CharDataset(training, self.config.data.block_size, cfg.seed)
        self.val_data = ValidationDataset(validation, self.config.data.block_size, cfg.eval_windows)
        self.sample_prompt = choose_sample_prompt(cfg.sample_prompt, validation, self.corpus.vocabulary)
        self.total_samples = (cfg.max_epochs or 0) * len(self.train_data)  # 0: no limit

    def _check_new(self) -> None:
        """Raises a UserError if this run, which has no snapshot, has had one: its rows would be removed."""
        saved = saved_steps(self.run_dir / "metrics.jsonl") if self.context.rank == 0 else []
        if saved:
            raise UserError(
                f"trainer.snapshot_path: there is no snapshot in {self.snapshots.storage.path}, but according to "
                f"{self.run_dir}/metrics.jsonl this run has saved {len(saved)}, the last at step {saved[-1]}: mount "
                f"the disk, or copy the snapshots there; to start anew, {new_run_advice(self.config_dict)}"
            )

    def _lock_folders(self) -> None:
        if self.context.rank == 0:
            for descriptor in lock_run(self.config.trainer):
                weakref.finalize(self, os.close, descriptor)

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
        elif not context.is_joining:
            weights = context.raise_on_all_ranks(lambda: self._initial_weights() if context.rank == 0 else {})
            self.strategy.load_full_state(weights, {}, 0)

    def _initial_weights(self) -> dict[str, Tensor]:
        torch.manual_seed(self.config.trainer.seed)
        model, path = GPT(self.model_config), self.config.trainer.init_from
        return model.state_dict() if path is None else load_initial_weights(path, model, self.corpus.vocabulary)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.last_step

    @property
    def last_step(self) -> int:
        """The step at which max_steps or max_epochs is reached."""
        cfg = self.config.trainer
        ends = [] if cfg.max_steps is None else [cfg.max_steps]
        if self.total_samples:
            ends.append(self.step + max(0, -(-(self.total_samples - self.samples) // cfg.batch_size)))
        return min(ends)

    def _open_files(self) -> None:
        """On rank 0, writes config.yaml and opens the metrics, without rows of steps that are not settled."""
        if self.context.rank:
            return
        write_config(self.run_dir, self.config_dict)
        self.metrics = MetricsLogger(self.run_dir, self.settled, self.last_step)
        if self.result is None:
            self.metrics.log("start", self.step, samples=self.samples, **self.numerics.choices)

    def _describe_device(self) -> str:
        return f"{platform.node()} {device_name(self.context.device)}"

    def _log_start(self, devices: list[str]) -> None:
        """Shows what is about to be trained, on which device of each rank."""
        config, context = self.config, self.context
        facts = {"backend": context.backend, **self.numerics.reasons, **self.strategy.description}
        if len(self.val_data) < self.val_data.windows_in_text:
            facts["evaluation"] = (
                f"{len(self.val_data):,} of the {self.val_data.windows_in_text:,} windows of the validation text, "
                "evenly spread"
            )
        sizes = (len(self.corpus.tokens), len(self.corpus.vocabulary))
        logger.info(run_summary(config, devices, facts, *sizes, len(self.train_data), self.last_step))
        with torch.device("meta"):
            logger.info(model_summary(GPT(self.model_config)))
        if self.resumed:
            file, hardware = self.snapshots.storage.file(self.step), self.numerics.choices["hardware"]
            lr = learning_rate(self.step, self.last_step, config.optimizer)
            for line in resume_summary(self.resumed, file, self.corpus.sha256, hardware, lr):
                logger.info(line)

    def _log_saves(self) -> None:
        for result in self.snapshots.poll():
            if result.is_saved:
                path = self.snapshots.storage.file(result.step)
                self.metrics.log_snapshot(result.step, path=path, val_loss=result.val_loss)
            else:
                self.metrics.log_snapshot(result.step, error=str(result.error))
            if result.error is not None:
                logger.warning(f"step {result.step}: {result.error}; training continues, and the next save tries again")

    def _log_memory(self) -> None:
        # With distributed.survive, all ranks need the same, and those that join later make no such call.
        usage: MemoryUsage = self.memory  # type: ignore[assignment]
        if not self.config.distributed.survive:
            usages = [MemoryUsage(**values) for values in self.context.all_gather_object(asdict(usage))]
            usage = max(usages, key=lambda memory: memory.total)
        cuda = self.context.device.type == "cuda"
        peak = f"; at the peak {format_bytes(torch.cuda.max_memory_allocated())}, activations included" if cuda else ""
        logger.info(f"memory measured, on the rank with most: {usage}{peak}")
