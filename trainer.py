"""The training loop: steps, evaluation, snapshots and stops.

Two integers, step and samples, determine the next step: sample order, dropout and learning rate are functions of (seed,
step, sample number), so a run that resumes from a snapshot continues as if nothing had happened.
"""

import math
import platform
import signal
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from char_dataset import CharDataset, ValidationDataset, check_num_targets, train_val_split
from mingpt.config.schema import Config, GPTConfig, config_to_dict
from mingpt.distributed.agreement import all_gather_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.monitoring.logging import logger
from mingpt.monitoring.profiler import profile_steps
from mingpt.monitoring.run_log import RunLog, StepTimer
from mingpt.optim.finite_guard import check_finite, check_gradient
from mingpt.optim.optimizer import learning_rate
from mingpt.parallel.build import build_strategy
from mingpt.parallel.memory import measure_memory
from mingpt.run import summary
from mingpt.run.evaluation import default_prompt, evaluate, generate_sample
from mingpt.run.numerics import set_numerics
from mingpt.run.progress import Progress, StepResult
from mingpt.run.replay import compute_twice
from mingpt.run.start import (
    adopt_snapshot,
    build_model,
    code_digests,
    initial_weights,
    load_corpus,
    lock_run,
    prepare_run,
)
from mingpt.snapshot.format import FORMAT_VERSION
from mingpt.snapshot.load import check_vocabulary
from mingpt.snapshot.manager import SnapshotManager
from mingpt.system.device import device_kind, gpu_metrics
from mingpt.system.signals import EXIT_STATUS, SignalHandler


class Trainer:
    """One run on one rank. It continues from the newest snapshot, or begins a new run if there is none.

    Its folders stay locked until `train` ends or `close` is called.

    Attributes:
        config: the configuration, with the model's shape from trainer.init_from
        model: the GPT; all ranks must call it together, since sharded strategies gather its parameters
        progress: step and samples so far, validation losses, best snapshot
        last_step: the step at which max_steps or max_epochs is reached
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
        with ExitStack() as resources:  # closed after an error, since a notebook continues and may keep this object
            self.lock = resources.enter_context(closing(lock_run(config, context)))
            self.signals = SignalHandler()
            self.snapshots = resources.enter_context(closing(SnapshotManager(config, context, self.lock, self.signals)))
            resources.callback(self.log.close)
            self._build(config, context)
            self.resources = resources.pop_all()

    def _build(self, given: Config, context: DistributedContext) -> None:
        """Builds the rest after the folders are locked. `given` may leave the model's shape to trainer.init_from."""
        newest = self.snapshots.load_newest()
        self.resumed = newest.header if newest is not None else None
        self.resumed_from = newest.path if newest is not None else ""
        config, tokenizer = adopt_snapshot(given, context, self.resumed)
        self.config = config

        self.corpus = load_corpus(config, context, tokenizer)
        check_vocabulary(tokenizer, self.resumed, config)
        training, validation = train_val_split(self.corpus.tokens, config.data)
        self.train_data = CharDataset(training, config.data.block_size, config.trainer.seed)
        self.val_data = ValidationDataset(validation, config.data.block_size, config.trainer.eval_windows)
        for data in (self.train_data, self.val_data):
            check_num_targets(data)
        self.sample_prompt = default_prompt(validation, tokenizer)
        if config.trainer.sample_prompt is not None:
            self.sample_prompt = tokenizer.encode(config.trainer.sample_prompt, "trainer.sample_prompt")

        self.numerics = set_numerics(config, context, self.resumed)
        vocab_size = len(tokenizer.vocabulary)
        self.model_config = GPTConfig(**asdict(config.model), vocab_size=vocab_size, block_size=config.data.block_size)
        model = build_model(self.model_config, config.trainer.seed, context)
        self.flops_per_token = model.flops_per_token()
        self.layers = summary.layers(model)
        weights = initial_weights(config, context, model, tokenizer) if newest is None else {}
        self.strategy = build_strategy(config, model, context, self.numerics.precision)
        self.model = self.strategy.full_model
        self.progress = Progress()
        if newest is None:
            self.strategy.load_full_state(weights, {}, source=0)
        else:
            self.progress.load_state_dict(newest.header, self.corpus.sha256, config.trainer.eval_windows)
            self.snapshots.restore(newest, self.strategy)

        self.timer = StepTimer(self.progress.samples)
        self.stop_signal = 0
        self.first_step = self.progress.step
        self.last_step = self.find_last_step()

    def find_last_step(self) -> int:
        """Returns the step at which max_steps or max_epochs is reached, whichever comes first."""
        cfg = self.config.trainer
        ends = []
        if cfg.max_steps is not None:
            ends.append(cfg.max_steps)
        if cfg.max_epochs is not None:
            samples_left = cfg.max_epochs * len(self.train_data) - self.progress.samples
            ends.append(self.progress.step + max(0, math.ceil(samples_left / cfg.batch_size)))
        return min(ends)

    def train(self) -> int:
        """Trains to the last step, or until trainer.patience or a signal ends the run. Returns the exit status.

        Raises:
            UserError: a loss is not finite, a file can't be written, or a folder was moved or deleted.
        """
        trace = self.run_dir / f"trace-{self.context.rank}.json"
        with profile_steps(self.config.trainer.profile_steps, trace) as step_profiler, self.signals:
            try:
                if not self.is_done():
                    self.start_log()
                    self.signals.exits_at_once = True  # until there is a step to save
                while not self.is_done():
                    self.advance()
                    step_profiler()
                return self.finish()
            finally:
                self.close()

    def start_log(self) -> None:
        """Logs a summary of the run, and opens the log. All ranks must call it."""
        context = self.context
        device = f"{platform.node()} {context.device} ({device_kind(context.device)})"
        devices = all_gather_object(context, device)  # on all ranks
        rows = {
            "backend": context.backend,
            **self.numerics.reasons,
            **self.strategy.description,
            **summary.data_rows(self.config.data.path, self.corpus, self.train_data, self.val_data),
            **summary.length_rows(self.config, self.progress, self.last_step, len(self.train_data)),
        }
        logger.info(summary.start(devices, rows))
        if self.resumed is None:
            logger.info(self.layers)
        else:
            logger.info(summary.resumed(self.resumed_from, self.resumed, self.snapshot_header()))
        with shared_errors(self.context):
            if self.context.rank == 0:
                self.log.open(self.config, self.progress.step, self.last_step)
                self.log.write("start", self.progress.step, samples=self.progress.samples, **self.numerics.choices)
        self.timer = StepTimer(self.progress.samples)  # excludes the time of the start

    # The loop

    def is_patience_over(self) -> bool:
        """Returns whether this step's evaluation was the last one that trainer.patience allows."""
        patience = self.config.trainer.patience
        is_evaluated = self.progress.val_loss is not None
        return patience is not None and is_evaluated and self.progress.best.evaluations_since >= patience

    def is_complete(self) -> bool:
        return self.progress.step >= self.last_step or self.is_patience_over()

    def is_done(self) -> bool:
        return self.is_complete() or self.stop_signal != 0

    def is_due(self, every: int | None) -> bool:
        """Returns True every `every` steps and after the last step, or never if `every` is None."""
        if every is None:
            return False
        step = self.progress.step
        return step % every == 0 or step == self.last_step or self.is_patience_over()

    def advance(self) -> None:
        """Makes one step, then evaluates, logs and saves what is due."""
        # Ranks agree on signals and on saves while they compute the step.
        flags = self.context.begin_step(self.signals.signal, int(self.snapshots.is_save_due()))
        result = self.train_step()
        self.signals.exits_at_once = False
        self.stop_signal, is_snapshot_due = flags.wait()
        self.after_step(result, bool(is_snapshot_due))

    def next_batch(self) -> range:
        """Returns the sample numbers of the next step, which may span two epochs of len(train_data) samples each."""
        cfg = self.config.trainer
        end = self.progress.samples + cfg.batch_size
        if cfg.max_epochs is not None:
            end = min(end, cfg.max_epochs * len(self.train_data))
        return range(self.progress.samples, end)

    def train_step(self) -> StepResult:
        """Makes one optimizer step: forward and backward of all micro-batches, clipping, and the update."""
        strategy = self.strategy
        batch = self.next_batch()
        step = self.progress.step + 1

        if self.is_replay_due():
            losses = compute_twice(strategy, partial(self.compute_gradients, batch), step)
        else:
            _, losses = self.compute_gradients(batch)
        lr = learning_rate(step, self.last_step, self.config.optimizer)
        grad_norm = strategy.update(lr)

        self.progress.step = step
        self.progress.samples = batch.stop
        self.progress.val_loss = None
        return StepResult(batch, losses, grad_norm, lr)

    def is_replay_due(self) -> bool:
        """Returns whether to compute the gradients of the next step twice. On GPUs, other kernels have other bits."""
        cfg = self.config.trainer
        is_deterministic = self.context.device.type == "cpu" or cfg.deterministic
        steps = self.progress.step - self.first_step
        return cfg.replay_every is not None and is_deterministic and steps % cfg.replay_every == 0

    def compute_gradients(self, batch: range) -> tuple[list[Tensor], list[Tensor]]:
        """Makes forward and backward of all micro-batches. Returns this rank's losses, and losses for `mean_loss`."""
        strategy = self.strategy
        strategy.broadcast_buffers()
        strategy.zero_grad()
        losses = []
        for micro_batch in strategy.micro_batches(batch):
            losses.append(strategy.forward_backward(micro_batch, self.train_data))  # the last one exchanges gradients
        return losses, strategy.reduce_gradients(batch, losses)

    def after_step(self, result: StepResult, is_snapshot_due: bool) -> None:
        """Logs, evaluates, generates a sample and saves what is due after a step, in this order."""
        cfg = self.config.trainer
        step = self.progress.step
        may_end = cfg.patience is not None and self.is_due(cfg.eval_every)
        is_log_due = step == 1 or may_end or self.is_due(cfg.log_every)
        is_other_due = any(map(self.is_due, (cfg.eval_every, cfg.sample_every, cfg.save_every)))
        is_any_due = is_log_due or is_other_due or is_snapshot_due or self.is_done()
        is_cpu = self.context.device.type == "cpu"  # on other devices, reading a value waits for the device
        if is_any_due or is_cpu:
            check_gradient(step, result.grad_norm, self.strategy.scaler, self.config.optimizer)
        loss = None
        if is_log_due or (is_cpu and self.context.world_size == 1):
            loss = self.strategy.mean_loss(result.losses).item()
            check_finite(step, "loss", loss, self.config.optimizer)
        self.log.advance(step, loss)
        if is_log_due:
            row = self.train_row(result)
        with self.timer.pause():  # tokens per second include only the time of steps
            if is_any_due:
                with shared_errors(self.context):
                    self.lock.check()
            if is_log_due:
                self.log.write("train", step, loss=loss, **row)
            if step == self.first_step + 1:
                usage = measure_memory(self.strategy)  # on all ranks
                logger.info(summary.memory(usage))
            epoch = result.batch.stop // len(self.train_data)
            if epoch > result.batch.start // len(self.train_data):
                logger.info(f"step {step}: epoch {epoch} is over ({len(self.train_data):,} windows)")
            if self.is_due(cfg.eval_every):
                self.evaluate()  # trainer.patience may end the run with this step
            if self.is_due(cfg.sample_every):
                sample = generate_sample(self.strategy, self.sample_prompt, cfg.seed)
                decode = self.corpus.tokenizer.decode
                self.log.write("sample", step, prompt=decode(self.sample_prompt), text=decode(sample))
            is_scheduled = self.is_due(cfg.save_every) or self.is_done()
            if is_scheduled or is_snapshot_due or self.progress.best.step == step:
                self.save_snapshot(is_scheduled)
            self.log_saves()

    def train_row(self, result: StepResult) -> dict[str, Any]:
        """Returns the values of a step's row in the log."""
        speed = self.timer.tokens_per_second(self.progress.samples, self.train_data.block_size)
        flops = speed / self.context.world_size * self.flops_per_token
        return {
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
        self.log.show("val", "evaluating")
        val_loss = evaluate(self.strategy, self.val_data)
        check_finite(step, "validation loss", val_loss, self.config.optimizer)
        self.progress.set_val_loss(val_loss, counts=step % self.config.trainer.eval_every == 0)
        self.log.write("eval", step, val_loss=val_loss, seconds=time.perf_counter() - began)

    def snapshot_header(self) -> dict[str, Any]:
        """Returns what a snapshot of this step contains, except for the state of model and optimizer."""
        return {
            "format": FORMAT_VERSION,
            **asdict(self.progress),
            "config": config_to_dict(self.config),
            "vocabulary": self.corpus.tokenizer.vocabulary,
            "choices": self.numerics.choices,
            "learning_rate": learning_rate(self.progress.step, self.last_step, self.config.optimizer),
            "text_sha256": self.corpus.sha256,
            "code": code_digests(),
            "scaler": self.strategy.scaler.state_dict(),
        }

    def save_snapshot(self, is_scheduled: bool) -> None:
        """Starts saving a snapshot of this step. A thread writes it while training continues.

        Args:
            is_scheduled: whether trainer.save_every requires it, or the run ends with this step
        """
        self.snapshots.save(self.snapshot_header(), self.strategy, is_scheduled)

    def log_saves(self) -> None:
        """Logs the saves that have ended since the last call, and the uploads that have failed."""
        for save in self.snapshots.ended():
            step = save.header["step"]
            error = save.future.exception()
            if error is None:
                row = {"path": self.snapshots.folder.file(step), "val_loss": save.header["val_loss"]}
                self.log.show("saved", str(step))
            else:
                row = {"error": str(error)}
                subject = str(step) if save.is_scheduled else "saves between those of trainer.save_every"
                message = f"step {step}: {error}; training continues, and the next save tries again"
                if not (self.is_done() or self.lock.lost_folder()):  # then, the end of the run reports it
                    self.snapshots.folder.warn_once(subject, message)
            if save.is_scheduled:
                self.log.write("snapshot", step, **row)

    def finish(self) -> int:
        """Waits for the last save, and reports how the run has ended. Returns the exit status.

        Ranks exit together, because as soon as one exits, torchrun stops the others, which may still be writing.

        Raises:
            UserError: the last snapshot could not be saved, or the mirror is not complete.
        """
        step = self.progress.step
        is_complete = self.is_complete()
        try:
            number = self.snapshots.finish(ends_at_signal=is_complete)
        finally:
            self.log_saves()
        end = "before all snapshots were uploaded; run the same command to upload them"
        if not is_complete:
            number = self.stop_signal
            end = "after saving a snapshot; run the same command to resume"
        name = signal.Signals(number).name if number else None
        early_end = self.early_end()
        self.log.write("stop", step, signal=name, reason=early_end)
        if name is not None:
            logger.info(f"stopped by {name} at step {step} {end}")
            return EXIT_STATUS[signal.Signals(number)]
        if step == self.first_step:
            logger.info(summary.already_trained(self.resumed_from, step, self.config, self.last_step, early_end))
            return 0
        folder = self.snapshots.folder
        best = folder.best if folder.best in folder.files() else None  # after a lost machine, only the mirror has it
        run_dir = self.config.trainer.run_dir
        logger.info(summary.done(folder.file(step), run_dir, self.progress, self.timer.elapsed, early_end, best))
        return 0

    def early_end(self) -> str | None:
        """Returns why the run has ended before its last step, if trainer.patience is the reason."""
        if self.progress.step >= self.last_step or not self.is_patience_over():
            return None
        return summary.patience_is_over(self.progress.best, self.config.trainer.patience)

    def close(self) -> None:
        """Closes files, ends threads and unlocks folders. It is also called after an error."""
        self.resources.close()
