"""What happens in a step, at the end of one, and when told to stop?

Progress is two integers, step and samples. Order, dropout and learning rate are functions of (seed, step, sample
number), so a run that goes on from a snapshot is the same run.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from char_dataset import CharDataset, ValidationDataset, train_val_split
from mingpt.corpus import encode_corpus
from mingpt.distributed.process_group import DistributedContext
from mingpt.evaluation import evaluate, generate_sample
from mingpt.optimizer import learning_rate
from mingpt.parallel.memory import MemoryUsage, format_bytes, format_memory, measure_memory, meta_model
from mingpt.parallel.validation import check_shares
from mingpt.snapshot.storage import PruneError, SnapshotStorage
from mingpt.utils.device import device_name
from mingpt.utils.errors import UserError
from mingpt.utils.files import lock_run_dir, write_config
from mingpt.utils.metrics import Metrics, NullMetrics
from mingpt.utils.profiler import profile_steps
from mingpt.utils.progress import banner, complain, format_duration, model_summary, nothing, say
from mingpt.utils.signals import EXIT_STATUS, SignalHandler
from state import TrainingState

if TYPE_CHECKING:
    from mingpt.config import Config

GRACE = 5.0  # seconds that a run which fails waits for a snapshot that is being written


class Trainer:
    """One run on one rank.

    Args:
        config: all sections
        world: the ranks

    Raises:
        UserError: text, folders or the snapshot to go on from do not fit.
    """

    def __init__(self, config: Config, context: DistributedContext) -> None:
        self.config, self.context = config, context
        self.say = say if context.rank == 0 else nothing
        knobs = config.trainer
        check_shares(config, context.world_size)
        self.run_dir = Path(knobs.run_dir)
        corpus = context.local_rank0_first(
            lambda: encode_corpus(config.data.path, self.run_dir / "cache", knobs.init_from, self.say)
        )
        context.check_equal({"the text's SHA-256": corpus.sha256})
        context.raise_on_all_ranks(lambda: lock_run_dir(self.run_dir, self) if context.rank == 0 else None)
        training, validation = train_val_split(corpus, config.data)
        self.training = CharDataset(training, config.data.block_size, knobs.seed)
        self.validation = ValidationDataset(validation, config.data.block_size)
        self.total_samples = (knobs.max_epochs or 0) * len(self.training)  # 0: no limit

        self.folder = SnapshotStorage(knobs.snapshot_path or str(self.run_dir / "snapshots"), knobs.keep_snapshots)
        self.state = TrainingState(config, context, corpus, self.folder, self.training[[0]], self.say)
        self.last_step = self._last_step()
        self.held = MemoryUsage(0, 0, 0)  # measured in the first step
        self.bad_step = torch.zeros((), device=self.state.strategy.device)
        self.unsaved = ""  # why the newest snapshot is not there
        members = context.all_gather_object(f"{platform.node()} {device_name(context.device)}")
        facts = self.state.reasons | {
            "memory": format_memory(self.state.need, config, self.state.shape, context.world_size)
        }
        self.say(banner(config, members, context.backend, facts, corpus, self.training, self.last_step))
        self.say(model_summary(meta_model(self.state.shape)))
        for line in self.state.changes(self.last_step):
            self.say(line)
        kinds = sorted(set(context.all_gather_object(self.state.choices["hardware"])))
        if config.distributed.reduction == "tree" and len(kinds) > 1:
            self.say(
                f"ranks run on {' and '.join(kinds)}: distributed.reduction tree repeats its bits on one kind alone"
            )

    def train(self) -> int:
        """Trains to the last step, or until told to stop.

        Returns:
            exit status: 0 at the goal, 143 or 130 when stopped by a signal

        Raises:
            UserError: a loss is not finite, or a file can't be written.
        """
        step = self.state.step
        if self.state.resumed and step >= self.last_step:
            self.say(
                f"already trained: {self.folder.file(step)} is at step {step}, and training ends at step "
                f"{self.last_step}. To go on, raise trainer.max_steps or trainer.max_epochs; to start anew, set "
                f"another trainer.run_dir.\n{self._what_next()}"
            )
            self.state.writer.wait()
            return 0
        self.context.run_on_rank0(lambda: write_config(self.run_dir, self.state.plain_config))
        metrics = self.context.raise_on_all_ranks(self._open_metrics)
        trace = self.run_dir / f"trace-{self.context.rank}.json"
        with (
            closing(metrics),
            profile_steps(self.config.trainer.profile_steps, trace, self.say) as step_is_over,
            SignalHandler() as stop,
        ):
            try:
                return self._train(metrics, stop, step_is_over)
            finally:
                self.state.writer.wait(GRACE)

    def _train(self, metrics: Metrics, stop: SignalHandler, step_is_over: Callable[[], None]) -> int:
        knobs, state = self.config.trainer, self.state
        saved_at = time.monotonic()
        began, first_step = time.perf_counter(), state.step
        since, since_samples = began, state.samples
        while state.step < self.last_step:
            late: int = self.context.rank == 0 and time.monotonic() > saved_at + 60 * (knobs.save_minutes or math.inf)
            voted = self.context.all_reduce_max_async(stop.signal, late)
            epoch = state.samples // len(self.training)
            losses, grad_norm, rate = self.train_step()
            log, evaluation, save = map(self._due, (knobs.log_every, knobs.eval_every, knobs.save_every))
            sample = knobs.sample_every is not None and self._due(knobs.sample_every)
            signalled, late = voted()
            save = bool(save or late or signalled)
            if self.context.device.type == "cpu" or log or evaluation or save:
                self._check_finite()
            metrics.advance(state.step)
            if log:
                mean_loss = state.strategy.mean(losses).item()
                self._check_finite(mean_loss)
                now = time.perf_counter()
                metrics.train(
                    state.step,
                    loss=mean_loss,
                    learning_rate=rate,
                    grad_norm=grad_norm.item(),
                    tokens_per_second=(state.samples - since_samples) * self.training.block_size / (now - since),
                    world_size=self.context.world_size,
                    restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                )
                since, since_samples = now, state.samples
            if state.samples // len(self.training) > epoch:
                self.say(f"step {state.step}: epoch {epoch + 1} is over ({len(self.training):,} windows)")
            paused = time.perf_counter()
            val_loss = None
            if evaluation:
                val_loss = evaluate(state, self.validation)
                metrics.evaluation(state.step, val_loss, time.perf_counter() - paused)
            if sample:
                metrics.sample(state.step, generate_sample(state))
            if save:
                state.save(val_loss, last=bool(signalled) or state.step == self.last_step)
                saved_at = time.monotonic()
            self._tell_what_was_written(metrics)
            if state.step == first_step + 1:
                self._tell_what_is_held()
            step_is_over()
            since += time.perf_counter() - paused
            if signalled:
                break
        state.writer.wait()
        self._tell_what_was_written(metrics)
        # Ranks leave together: when one does, torchrun ends the others, who may be writing yet.
        failures = self.context.exchange_messages(state.writer_ranks, self.unsaved)
        stopped = signalled if state.step < self.last_step else 0
        metrics.row("stop", state.step, signal=signal.Signals(stopped).name if stopped else None)
        if any(failures.values()):
            raise UserError(
                f"training has come to step {state.step}, but its snapshot is not saved: "
                f"{next(filter(None, failures.values()))}; then the same command goes on from the newest"
            )
        if stopped:
            name = signal.Signals(stopped).name
            self.say(f"stopped by {name} at step {state.step}, and saved; the same command goes on")
            return EXIT_STATUS[signal.Signals(stopped)]
        self.say(
            f"done in {format_duration(time.perf_counter() - began)}: validation loss {val_loss:.4f}, "
            f"snapshot {self.folder.file(state.step)}\n{self._what_next()}"
        )
        return 0

    def _tell_what_was_written(self, metrics: Metrics) -> None:
        """Says what came of snapshots since it was last asked."""
        for step, val_loss, error, _ in self.state.what_was_written():
            if error is not None and not isinstance(error, UserError):
                raise error
            there = error is None or isinstance(error, PruneError)
            self.unsaved = "" if there else str(error)
            if there:
                metrics.snapshot(step, path=self.folder.file(step), val_loss=val_loss)
            else:
                metrics.snapshot(step, error=self.unsaved)
            if error is not None:
                complain(f"step {step}: {error}; training goes on, and the next save tries again")

    def _tell_what_is_held(self) -> None:
        largest = max(self.context.all_gather_object(self.held), key=lambda measure_memory: measure_memory.total)
        peak = ""
        if self.context.device.type == "cuda":
            peak = f"; at the peak {format_bytes(torch.cuda.max_memory_allocated())}, activations included"
        self.say(f"memory measured, on the rank with most: {largest}{peak}")

    def train_step(self) -> tuple[list[Tensor], Tensor, float]:
        """One optimizer step; returns this rank's parts of the batch's mean loss, the gradient's norm and the rate."""
        knobs, state = self.config.optimizer, self.state
        count = self.config.trainer.batch_size
        if self.total_samples:
            count = min(count, self.total_samples - state.samples)
        strategy = state.strategy
        losses = strategy.backward(range(state.samples, state.samples + count), self.training)
        strategy.scaler.unscale_(strategy.optimizer)
        grad_norm = strategy.clip(knobs.grad_norm_clip)
        state.step += 1
        state.samples += count
        rate = learning_rate(state.step, self.last_step, knobs)
        for group in strategy.optimizer.param_groups:
            group["lr"] = rate
        if not strategy.scaler.is_enabled():
            # From the first gradient on that is not finite, the optimizer leaves weights alone without asking the
            # device: the fused kernel reads found_inf, GradScaler's own way of making it skip. All ranks see one norm.
            broken = (self.bad_step == 0) & ~grad_norm.isfinite()
            self.bad_step = torch.where(broken, state.step, self.bad_step)
            strategy.stepper.grad_scale = None  # type: ignore[attr-defined]
            strategy.stepper.found_inf = (self.bad_step > 0).float()  # type: ignore[attr-defined]
        strategy.scaler.step(strategy.optimizer)
        strategy.scaler.update()
        if not self.held.total:
            self.held = measure_memory(strategy)
        strategy.optimizer.zero_grad(set_to_none=True)
        return losses, grad_norm, rate

    def _check_finite(self, mean_loss: float = 0.0) -> None:
        bad_step = int(self.bad_step) if math.isfinite(mean_loss) else self.state.step
        if bad_step:
            steps = self.folder.steps() if self.context.rank == 0 else []
            newest = self.folder.file(steps[-1]) if steps else "none yet"
            knobs = self.config.optimizer
            raise UserError(
                f"step {bad_step}: the loss is not finite; no weight and no snapshot was touched by it. "
                f"Newest snapshot: {newest}. Lower optimizer.learning_rate ({knobs.learning_rate:g}) or "
                f"optimizer.grad_norm_clip ({knobs.grad_norm_clip or 'null'})"
            )

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.last_step

    def _last_step(self) -> int:
        """The step that training ends with: max_steps, or the one in which max_epochs are over."""
        knobs = self.config.trainer
        ends = [] if knobs.max_steps is None else [knobs.max_steps]
        if self.total_samples:
            ends.append(self.state.step + max(0, -(-(self.total_samples - self.state.samples) // knobs.batch_size)))
        return min(ends)

    def _open_metrics(self) -> Metrics:
        if self.context.rank:
            return NullMetrics()
        metrics = Metrics(self.run_dir, self.state.step, self.last_step)
        metrics.row("start", self.state.step, samples=self.state.samples, **self.state.choices)
        return metrics

    def _what_next(self) -> str:
        snapshot = shlex.quote(self.folder.file(self.state.step))
        return (
            f"to sample it:  python sample.py --snapshot {snapshot}\n"
            f"to look back:  python plot.py {shlex.quote(str(self.run_dir))}\n"
            f"to export it:  python export.py --snapshot {snapshot} --out FOLDER"
        )
