"""The training loop: steps, evaluation, snapshots and stops.

Two integers, step and samples, determine the next step: sample order, dropout and learning rate are functions of (seed,
step, sample number), so a run that resumes from a snapshot continues as if nothing had happened.
"""

import math
import platform
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from char_dataset import CharDataset, ValidationDataset
from mingpt import __version__, summary
from mingpt.config.schema import MAX_STEPS, Config, config_to_dict
from mingpt.distributed.agreement import all_gather_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.monitoring.logging import logger
from mingpt.monitoring.profiler import profiler
from mingpt.monitoring.run_log import RunLog, StepTimer
from mingpt.optim.finite_guard import check_finite
from mingpt.optim.optimizer import learning_rate
from mingpt.parallel.build import build_strategy
from mingpt.parallel.evaluation import choose_prompt, evaluate, generate_sample
from mingpt.parallel.numerics import set_numerics
from mingpt.parallel.strategy import UPDATING
from mingpt.snapshot.format import FORMAT_VERSION, Best, Progress
from mingpt.snapshot.manager import SnapshotManager
from mingpt.start import adopt_snapshot, build_model, code_digests, initial_weights, load_corpus, prepare_run
from mingpt.system.device import device_kind, gpu_metrics
from mingpt.system.run_lock import RunLock
from mingpt.system.signals import EXIT_STATUS, SignalHandler


class StepResult(NamedTuple):
    """The results of an optimizer step. Tensors are on the device."""

    batch: range  # sample numbers of all ranks
    losses: list[Tensor]  # this rank's terms of the mean loss
    grad_norm: Tensor  # before clipping
    learning_rate: float
    stop_signal: int  # stops all ranks after this step; 0: none
    is_save_due: bool


class Trainer:
    """One run on one rank. It continues from the newest snapshot, or begins a new run if there is none.

    Its folder stays locked until `train` ends or `close` is called.

    Attributes:
        config: the configuration, with the model's shape from trainer.init_from
        model: the GPT; all ranks must call it together, since sharded strategies gather its parameters
        progress: step and samples so far, validation losses, best snapshot
        max_samples: number of sequences in max_epochs; without it, in the largest number of steps
        last_step: the step at which max_steps or max_epochs is reached, whichever comes first
        resumed: header of the snapshot that this process resumed from; None in a new run
        resumed_from: path of that snapshot
        stop_signal: the signal that stops the run, on all ranks after the same step; 0: none yet

    Raises:
        UserError: text, folders, snapshots or ranks do not fit the configuration, or another run uses these folders.
    """

    def __init__(self, config: Config, context: DistributedContext) -> None:
        prepare_run(config, context)
        self.context = context
        self.run_dir = Path(config.trainer.run_dir)
        self.log = RunLog()
        self.signals = SignalHandler()
        with shared_errors(context):
            self.lock = RunLock(self.run_dir) if context.rank == 0 else None
        self.snapshots = SnapshotManager(config, context, self.lock)
        try:
            self._build(config)
        except BaseException:
            self.close()  # a notebook continues, and may keep this object
            raise

    def _build(self, config: Config) -> None:
        """Builds the rest after the folder is locked."""
        context = self.context
        newest = self.snapshots.load_newest()
        self.resumed = newest.header if newest is not None else None
        self.resumed_from = newest.path if newest is not None else ""
        config, known_tokenizer = adopt_snapshot(config, context, self.resumed)
        self.config = config

        self.corpus = load_corpus(config, context, known_tokenizer, newest is None, self.snapshots.is_writer)
        tokenizer = self.corpus.tokenizer
        self.train_data = CharDataset(self.corpus.training, config.data.block_size, config.trainer.seed)
        self.val_data = ValidationDataset(self.corpus.validation, config.data.block_size, config.trainer.eval_windows)
        self.sample_prompt = choose_prompt(config.trainer.sample_prompt, self.corpus.validation, tokenizer)

        self.numerics = set_numerics(config, context, self.resumed)
        model = build_model(config, tokenizer.vocab_size)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.flops_per_token = model.flops_per_token()
        # All ranks begin with the weights of rank 0: the same seed may give others on another kind of processor.
        weights = initial_weights(config, context, model, self.corpus) if newest is None else {}
        self.strategy = build_strategy(config, model, context, self.numerics.precision)
        self.model = self.strategy.full_model
        if newest is None:
            self.progress = Progress()
            self.strategy.load_full_state(weights, {}, source=0)
        else:
            self.progress = Progress.from_header(newest.header)
            self.snapshots.restore(newest, self.strategy)
        self.first_step = self.progress.step
        cfg = config.trainer
        self.max_samples = cfg.max_epochs * len(self.train_data) if cfg.max_epochs else MAX_STEPS * cfg.batch_size
        steps_left = math.ceil(max(0, self.max_samples - self.progress.samples) / cfg.batch_size)
        self.last_step = min(cfg.max_steps or MAX_STEPS, self.progress.step + steps_left)
        self.timer = StepTimer(self.progress.samples)
        self.stop_signal = 0

    def train(self) -> int:
        """Trains to the last step, or until a signal ends the run. Returns the exit status.

        Raises:
            UserError: a loss is not finite, a file can't be written, or a folder was moved or deleted.
        """
        trace = self.run_dir / f"trace-{self.context.rank}.json"
        with profiler(self.config.trainer.profile_steps, trace) as profile, self.signals:
            try:
                if not self.is_done():
                    self.start_log()
                while not self.is_done():
                    result = self.train_step()
                    self.stop_signal = result.stop_signal
                    self.after_step(result)
                    if profile is not None:
                        profile.step()
                return self.finish()
            finally:
                self.close()

    def start_log(self) -> None:
        """Logs a summary of the run, and opens the log. All ranks must call it."""
        context = self.context
        devices = all_gather_object(context, f"{platform.node()} {context.device} ({device_kind(context.device)})")
        rows = {"backend": context.backend, **self.numerics.reasons, **self.strategy.description}
        rows["model"] = f"{self.num_parameters:,} parameters"
        rows |= summary.data_rows(self.config, self.corpus, len(self.train_data), len(self.val_data))
        samples = self.progress.samples + (self.last_step - self.progress.step) * self.config.trainer.batch_size
        rows["length"] = f"{self.last_step:,} steps = {samples / len(self.train_data):.2f} epochs"
        rows["run"] = f"{self.run_dir}: kill it at any time; the same command resumes it"
        logger.info(summary.start(devices, rows))
        changed = []
        if self.resumed is not None:
            logger.info(summary.resumed(self.resumed_from, self.resumed, self.snapshot_header()))
            changed = summary.changed_values(self.resumed, self.snapshot_header())
        with shared_errors(context):
            if context.rank == 0:
                self.log.open(self.config, self.progress.step, self.last_step)
                values = {"samples": self.progress.samples, "block_size": self.train_data.block_size}
                self.log.write("start", self.progress.step, **values, changed=changed, **self.numerics.choices)
        self.timer = StepTimer(self.progress.samples)  # excludes the time of the start

    # The loop

    def is_complete(self) -> bool:
        return self.progress.step >= self.last_step

    def is_done(self) -> bool:
        return self.is_complete() or self.stop_signal != 0

    def is_due(self, every: int | None) -> bool:
        """Returns True every `every` steps and after the last step, or never if `every` is None."""
        return every is not None and (self.progress.step % every == 0 or self.is_complete())

    def next_batch(self) -> range:
        """Returns the sample numbers of the next step, which may span two epochs of len(train_data) samples each.

        Pipeline stages take at most trainer.batch_size of them.
        """
        first = self.progress.samples
        return range(first, min(first + self.config.trainer.batch_size, self.max_samples))

    def train_step(self) -> StepResult:
        """Makes one optimizer step: forward and backward of all micro-batches, clipping, and the update."""
        strategy = self.strategy
        step = self.progress.step + 1
        batch = self.next_batch()
        micro_batches = strategy.read(batch, self.train_data)
        # Ranks exchange these numbers while they compute.
        stop_signals, saves_due, target_counts = self.context.begin_step(
            self.signals.signal, self.snapshots.is_save_due(), strategy.count_targets(micro_batches)
        )

        strategy.broadcast_buffers()
        strategy.zero_grad()
        losses = strategy.forward_backward(micro_batches, target_counts)  # the last backward pass exchanges gradients
        strategy.seed(step, UPDATING)  # an optimizer that draws random numbers draws the same ones on all ranks
        lr = learning_rate(step, self.last_step, self.config.optimizer)
        grad_norm = strategy.update(lr)

        self.progress.step = step
        self.progress.samples = batch.stop
        self.progress.val_loss = None
        return StepResult(batch, losses, grad_norm, lr, max(stop_signals.wait()), any(saves_due.wait()))

    def after_step(self, result: StepResult) -> None:
        """Logs, evaluates, generates a sample and saves what is due after a step, in this order."""
        cfg = self.config.trainer
        step = self.progress.step
        log = step == 1 or self.is_due(cfg.log_every)
        evaluation = self.is_due(cfg.eval_every)
        sample = self.is_due(cfg.sample_every)
        scheduled_save = self.is_due(cfg.save_every) or self.is_done()
        if log or evaluation or sample or scheduled_save or result.is_save_due:
            # Reading the norm waits for a GPU. In fp16, GradScaler skips updates by such gradients.
            if not self.strategy.scaler.is_enabled():
                check_finite(step, "norm of the gradient", result.grad_norm.item(), self.config.optimizer)
            with shared_errors(self.context):
                if self.lock is not None:
                    self.lock.check()
        row = self.train_row(result) if log else {}
        with self.timer.pause():  # tokens per second include only the time of steps
            if log:
                self.log.write("train", step, **row)
            if evaluation:
                self.evaluate()
            if sample:
                self.generate_sample()
            if scheduled_save or result.is_save_due or self.progress.best.step == step:
                # A thread writes it while training continues.
                self.snapshots.save(self.snapshot_header(), self.strategy, scheduled_save)
            self.snapshots.log_ended(self.log, is_last=self.is_done())

    def train_row(self, result: StepResult) -> dict[str, Any]:
        """Returns the values of a step's row in the log."""
        loss = self.strategy.mean_loss(result.losses).item()
        check_finite(self.progress.step, "loss", loss, self.config.optimizer)
        speed = self.timer.tokens_per_second(self.progress.samples, self.train_data.block_size)
        flops = speed / self.context.world_size * self.flops_per_token
        return {
            "samples": self.progress.samples,
            "loss": loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm.item(),
            "tokens_per_second": speed,
            "world_size": self.context.world_size,
            "restart_count": self.context.restart_count,
            **gpu_metrics(self.context.device, self.numerics.precision, flops),
        }

    # Evaluation, saving, the end

    def evaluate(self) -> None:
        """Computes and logs the validation loss of this step."""
        began = time.perf_counter()
        step = self.progress.step
        val_loss = evaluate(self.strategy, self.val_data)
        check_finite(step, "validation loss", val_loss, self.config.optimizer)
        self.progress.val_loss = val_loss
        if val_loss < self.progress.best.val_loss:
            self.progress.best = Best(step, val_loss)
        values = {
            "samples": self.progress.samples,
            "val_loss": val_loss,
            "val_bpb": self.corpus.bits_per_byte(val_loss),
        }
        self.log.write("eval", step, **values, seconds=time.perf_counter() - began)

    def generate_sample(self) -> None:
        """Generates and logs a sample of this step's model."""
        sample = generate_sample(self.strategy, self.sample_prompt, self.config.trainer.seed)
        decode = self.corpus.tokenizer.decode
        self.log.write("sample", self.progress.step, prompt=decode(self.sample_prompt), text=decode(sample))

    def snapshot_header(self) -> dict[str, Any]:
        """Returns what a snapshot of this step contains, except for the state of model and optimizer."""
        return {
            "version": __version__,
            "format": FORMAT_VERSION,
            **asdict(self.progress),
            "config": config_to_dict(self.config),
            "choices": self.numerics.choices,
            "learning_rate": learning_rate(self.progress.step, self.last_step, self.config.optimizer),
            **self.corpus.entries,
            "code": code_digests(),
            "scaler": self.strategy.scaler.state_dict(),
            "param_groups": self.strategy.changed_groups(),
        }

    def finish(self) -> int:
        """Waits for the last save, and reports how the run has ended. Returns the exit status.

        Ranks exit together, because as soon as one exits, torchrun stops the others, which may still be writing.

        Raises:
            UserError: the last snapshot could not be saved, or the mirror is not complete.
        """
        step = self.progress.step
        try:
            self.snapshots.finish(self.is_complete())
        finally:
            self.snapshots.log_ended(self.log, is_last=True)
        if not self.is_complete():
            stopped_by = signal.Signals(self.stop_signal)
            self.log.write("stop", step, signal=stopped_by.name)
            logger.info(summary.stopped(stopped_by.name, step))
            return EXIT_STATUS[stopped_by]
        self.log.write("stop", step, signal=None)
        if step == self.first_step:
            logger.info(summary.already_trained(self.resumed_from, step, self.config, self.last_step))
            return 0
        val_loss = self.progress.val_loss or 0.0  # the last step evaluates
        bits = self.corpus.bits_per_byte(val_loss)
        best = self.progress.best
        if best.step not in self.snapshots.folder.files():  # it is damaged, or its save has failed
            best = Best(step, val_loss)
        path = self.snapshots.folder.file(step)
        logger.info(summary.done(self.config, self.timer.elapsed, val_loss, bits, path, best))
        return 0

    def close(self) -> None:
        """Closes files, ends threads and unlocks the folder. It is also called after an error."""
        self.log.close()
        self.snapshots.close()
        if self.lock is not None:
            self.lock.close()
            self.lock = None
