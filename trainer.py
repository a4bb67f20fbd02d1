"""The training loop: steps, evaluation, snapshots and stops.

Progress is two integers, step and samples. Sample order, dropout and learning rate are functions of (seed, step, sample
number), so a run that resumes from a snapshot is the same run.
"""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from char_dataset import CharDataset, ValidationDataset, train_val_split
from mingpt.config import Config, GPTConfig, config_to_dict
from mingpt.corpus import encode_corpus
from mingpt.distributed.process_group import DistributedContext
from mingpt.evaluation import Evaluation, choose_sample_prompt, generate_sample
from mingpt.monitoring.profiler import profile_steps
from mingpt.optimizer import FiniteGuard, learning_rate
from mingpt.parallel.build import agree_on_numerics, build_strategy
from mingpt.report import Report, StepResult
from mingpt.signals import SignalHandler
from mingpt.snapshot.manager import SnapshotManager, check_compatible
from mingpt.snapshot.pretrained import load_initial_weights, load_pretrained
from model import GPT

EXIT_WAIT_SECONDS = 5.0  # how long a failing run waits for a snapshot that is being written


class Trainer:
    """One run on one rank.

    Attributes:
        step: finished optimizer steps
        samples: the sequences in them
        stop_signal: the signal that stops the run, on all ranks after the same step; 0: none yet
        lacks_evaluation: a signal has broken off the evaluation of the newest step; the next start makes up for it

    Raises:
        UserError: text, folders or ranks do not fit the configuration.
    """

    def __init__(self, config: Config, context: DistributedContext) -> None:
        self.config = config
        self.config_dict = config_to_dict(config)
        self.context = context
        self.run_dir = Path(config.trainer.run_dir)
        self._load_text()
        path = config.trainer.snapshot_path or f"{self.run_dir}/snapshots"
        timeout = config.distributed.timeout_seconds
        self.snapshots = SnapshotManager(context, path, config.trainer.keep_snapshots, timeout)
        self.resumed: dict[str, Any] | None = None  # the snapshot that this run continues, without its tensors
        self.step = 0
        self.samples = 0
        self.stop_signal = 0
        self.val_loss = math.nan  # the newest one
        self.lacks_evaluation = False
        self.saved_at = time.monotonic()

    def _load_text(self) -> None:
        config = self.config
        pretrained_vocabulary = None
        if config.trainer.init_from:
            pretrained_vocabulary = self._pretrained_vocabulary
        cache = self.run_dir / "cache"
        with self.context.local_rank0_first():
            verify = self.context.local_rank == 0  # one process per machine compares the cache with its digest
            self.corpus = encode_corpus(
                config.data.path, cache, pretrained_vocabulary, config.trainer.init_from or "", verify
            )
        self.context.check_equal({"the text's SHA-256": self.corpus.sha256})
        training, validation = train_val_split(self.corpus, config.data)
        self.train_data = CharDataset(training, config.data.block_size, config.trainer.seed)
        self.val_data = ValidationDataset(validation, config.data.block_size, config.trainer.eval_windows)
        self.sample_prompt = choose_sample_prompt(config.trainer.sample_prompt, validation, self.corpus.vocabulary)

    def _pretrained_vocabulary(self) -> str:
        return load_pretrained(str(self.config.trainer.init_from), "trainer.init_from").vocabulary

    def train(self) -> int:
        """Trains to the last step, or until a signal stops it. Returns the exit status.

        Raises:
            UserError: a loss is not finite, or a file can't be written.
        """
        self.resume()
        if self.is_done() and not self.lacks_evaluation:
            self.report.already_trained()
            self.context.end_collectives()
            self.snapshots.writer.wait()
            return 0
        self.report.start()
        trace = self.run_dir / f"trace-{self.context.rank}.json"
        with profile_steps(self.config.trainer.profile_steps, trace) as step_profiler, SignalHandler() as self.signals:
            try:
                if self.lacks_evaluation:
                    self.make_up_evaluation()
                while not self.is_done():
                    self.advance()
                    step_profiler()
                return self.finish()
            finally:
                self.close()

    # The start

    def resume(self) -> None:
        """Continues from the newest snapshot; without one, a new run begins."""
        header = self.snapshots.load_newest()
        if header is None:
            self.snapshots.check_new(self.run_dir, self.config_dict)
            self.build({})
            weights: dict[str, Tensor] = {}
            with self.context.shared_errors():
                if self.context.rank == 0:
                    weights = self._initial_weights()
            self.strategy.load_full_state(weights, {}, source=0)
            return
        check_compatible(header, self.config_dict, self.corpus.vocabulary)
        self.resumed = header
        self.config_dict["trainer"]["init_from"] = header["config"]["trainer"]["init_from"]  # what the run began with
        self.step = header["step"]
        self.samples = header["samples"]
        self.build(header["choices"])
        self.snapshots.restore(header, self.strategy)
        eval_every = header["config"]["trainer"]["eval_every"]
        was_due = self.step % eval_every == 0 or self.step == self.last_step
        self.lacks_evaluation = was_due and header["val_loss"] is None

    def build(self, previous_choices: dict[str, Any]) -> None:
        """Builds the model as the configuration says, without weights.

        Args:
            previous_choices: precision and threads of the run so far; empty in a new run
        """
        config = self.config
        self.numerics = agree_on_numerics(config, self.context, previous_choices)
        vocab_size = len(self.corpus.vocabulary)
        self.model_config = GPTConfig(**asdict(config.model), vocab_size=vocab_size, block_size=config.data.block_size)
        with torch.device("meta"):  # the full model need not fit into memory
            model = GPT(self.model_config)
        self.report: Report = Report(self, model)
        example = self.train_data[[0]]
        self.strategy = build_strategy(config, model, self.context, self.numerics.precision, example)
        self.guard = FiniteGuard(self.strategy, config.optimizer, self.snapshots.newest_file)

    def _initial_weights(self) -> dict[str, Tensor]:
        torch.manual_seed(self.config.trainer.seed)
        model = GPT(self.model_config)
        if self.config.trainer.init_from is None:
            return model.state_dict()
        return load_initial_weights(self.config.trainer.init_from, model, self.corpus.vocabulary)

    # The loop

    @property
    def last_step(self) -> int:
        """The step at which max_steps or max_epochs is reached."""
        cfg = self.config.trainer
        ends = []
        if cfg.max_steps is not None:
            ends.append(cfg.max_steps)
        if cfg.max_epochs is not None:
            samples_left = cfg.max_epochs * len(self.train_data) - self.samples
            ends.append(self.step + max(0, math.ceil(samples_left / cfg.batch_size)))
        return min(ends)

    def is_done(self) -> bool:
        return self.step >= self.last_step or self.stop_signal != 0

    def is_due(self, every: int) -> bool:
        """Whether something is due after this step that happens every so many steps, and after the last one."""
        return self.step % every == 0 or self.step == self.last_step

    def advance(self) -> None:
        """Makes one step, and whatever is due after it."""
        # What a single rank knows is agreed on while the step is computed.
        flags = self.context.all_reduce_flags(self.signals.signal, int(self.is_save_overdue()))
        result = self.train_step()
        self.stop_signal, save_now = flags.wait()
        self.after_step(result, bool(save_now))

    def is_save_overdue(self) -> bool:
        minutes = self.config.trainer.save_minutes or math.inf
        return self.context.rank == 0 and time.monotonic() > self.saved_at + 60 * minutes

    def train_step(self) -> StepResult:
        """One optimizer step: forward and backward of all micro-batches, clipping, and the update."""
        cfg = self.config.trainer
        strategy = self.strategy
        end = self.samples + cfg.batch_size
        if cfg.max_epochs is not None:
            end = min(end, cfg.max_epochs * len(self.train_data))
        batch = range(self.samples, end)

        strategy.optimizer.zero_grad(set_to_none=True)
        losses = []
        for micro_batch in strategy.micro_batches(batch):  # ranks exchange gradients in the backward pass of the last
            losses += strategy.forward_backward(micro_batch, self.train_data)
        losses = strategy.reduce_gradients(batch, losses)

        strategy.scaler.unscale_(strategy.optimizer)  # in fp16; otherwise the scaler only calls the optimizer
        grad_norm = strategy.clip_grad_norm_(self.config.optimizer.grad_norm_clip)
        lr = learning_rate(self.step + 1, self.last_step, self.config.optimizer)
        for group in strategy.optimizer.param_groups:
            group["lr"] = lr
        self.guard.watch(self.step + 1, grad_norm)
        strategy.scaler.step(strategy.optimizer)
        strategy.scaler.update()

        self.step += 1
        self.samples = batch.stop
        return StepResult(losses, grad_norm, lr)

    def after_step(self, result: StepResult, save_now: bool) -> None:
        """Computes what is due after a step, then writes and shows it: loss, validation loss, a sample, a snapshot."""
        cfg = self.config.trainer
        logs = self.step == 1 or self.is_due(cfg.log_every)
        evaluates = self.is_due(cfg.eval_every)
        saves = self.is_due(cfg.save_every) or save_now
        if logs or evaluates or saves or self.stop_signal:
            self.guard.check(self.step)
        mean_loss = math.nan  # not known: on a GPU, reading it would wait for the step
        if logs or self.report.shows_every_loss:
            mean_loss = self.strategy.mean_loss(result.losses).item()
        if logs:
            self.guard.check(self.step, mean_loss)
            self.report.measure_speed()
        with self.report.timer.pause():  # tokens per second are those of steps alone
            val_loss = None
            if evaluates:
                val_loss = self.evaluate()
            self.lacks_evaluation = evaluates and val_loss is None
            self.report.step(result, mean_loss, logs)
            if val_loss is not None:
                self.report.evaluation(val_loss)
            if cfg.sample_every is not None and self.is_due(cfg.sample_every):
                sample = generate_sample(self.strategy, self.corpus.vocabulary, self.sample_prompt, cfg.seed)
                self.report.sample(sample)
            if saves or self.is_done():
                self.save_snapshot(val_loss)
            self.report.saves(self.snapshots.poll())

    # Evaluation, saving, the end

    def evaluate(self) -> float | None:
        """Computes the validation loss; None if a signal stops the run before or meanwhile."""
        batch_size = self.config.trainer.micro_batch_size or self.config.trainer.batch_size
        evaluation = Evaluation(self.strategy, self.val_data, batch_size)
        self.report.show_evaluation(0)
        while not evaluation.is_done and not self.stop_signal:
            flags = self.context.all_reduce_flags(self.signals.signal)
            evaluation.advance()
            self.report.show_evaluation(evaluation.batches_done / len(evaluation.batches))
            [self.stop_signal] = flags.wait()
        self.report.show_evaluation(None)
        if not evaluation.is_done:
            return None
        self.val_loss = evaluation.mean_loss()
        self.guard.check_val_loss(self.step, self.val_loss)
        return self.val_loss

    def make_up_evaluation(self) -> None:
        """Evaluates the step that the run has resumed from, and saves it again, with its validation loss."""
        with self.report.timer.pause():
            val_loss = self.evaluate()
        if val_loss is not None:
            self.report.evaluation(val_loss)
            self.save_snapshot(val_loss)
            self.lacks_evaluation = False

    def save_snapshot(self, val_loss: float | None) -> None:
        """Starts to save a snapshot of this step, which a thread writes while training continues."""
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
        self.snapshots.save(header, self.strategy, is_last=self.is_done())
        self.saved_at = time.monotonic()

    def finish(self) -> int:
        """Waits for the last save, and reports how the run has ended. Returns the exit status.

        Ranks exit together: if one exits, torchrun ends the others, which may still be writing.

        Raises:
            UserError: the last snapshot is not saved.
        """
        self.context.end_collectives()
        self.snapshots.writer.wait()
        self.report.saves(self.snapshots.poll())
        errors = self.context.exchange_messages(self.snapshots.writer_ranks, self.snapshots.last_error)
        return self.report.finish(errors)

    def close(self) -> None:
        """Closes the files, also after an error."""
        self.report.close()
        self.snapshots.writer.wait(EXIT_WAIT_SECONDS)
