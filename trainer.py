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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from char_dataset import CharDataset, ValidationDataset, split
from composition import check_shares
from corpus import encode_corpus
from distributed import World
from errors import UserError
from evaluation import validation_loss, written_by
from hardware import device_name
from memory import Bytes, held, on_paper, size, told
from metrics import Metrics, NoMetrics
from optimizer import learning_rate
from profiling import profiled
from run_folder import occupy, write_config
from screen import banner, complain, duration, nothing, say, summary
from snapshot import NotPrunedError, SnapshotFolder
from state import TrainingState
from stopping import STATUS, Stop

if TYPE_CHECKING:
    from main import Config

GRACE = 5.0  # seconds that a run which fails waits for a snapshot that is being written


@dataclass(frozen=True)
class TrainerConfig:
    """How long, in which portions, and what is kept. Counts of steps are optimizer steps.

    Args:
        max_epochs: passes over the training text; null: no limit
        max_steps: steps; null: no limit. Training ends with whichever limit comes first
        batch_size: sequences in a step, all ranks together
        micro_batch_size: most sequences that a rank puts through the model at once; null: its whole share of the batch
        precision: of matrix products: fp32, bf16, fp16 (CUDA GPUs), or auto: bf16 where the hardware has it, else fp32
        threads: CPU threads of each rank, or auto: OMP_NUM_THREADS, else cores / ranks on the machine
        compile: compile the model's blocks with torch.compile: faster steps, after a minute or so of compiling
        activation_checkpointing: what backward computes again instead of keeping it: none, selective (all but outputs
            of matrix products), full (all but each block's input)
        deterministic: on CUDA GPUs, take kernels that repeat their bits; slower. CPUs always do
        seed: of initial weights, order and dropout
        init_from: snapshot, run folder or folder of export.py whose weights a new run starts from; null: random ones
        log_every: steps between lines and rows of loss and speed
        eval_every: steps between losses over the whole validation text
        sample_every: steps between samples of what the model writes; null: none
        save_every: steps between snapshots
        save_minutes: minutes after which a snapshot is due whatever the step; null: steps alone decide
        keep_snapshots: how many of the newest stay, beside the best by validation loss
        profile_steps: steps of which each rank writes a trace into run_dir, from the twelfth on; null: none
        run_dir: folder of the run: config.yaml, metrics.jsonl, snapshots/, and the encoded text in cache/
        snapshot_path: folder or fsspec URL of the snapshots; null: snapshots/ in run_dir
    """

    max_epochs: int | None = None
    max_steps: int | None = 2400
    batch_size: int = 12
    micro_batch_size: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    threads: int | Literal["auto"] = "auto"
    compile: bool = False
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    deterministic: bool = False
    seed: int = 1
    init_from: str | None = None
    log_every: int = 100
    eval_every: int = 400
    sample_every: int | None = 400
    save_every: int = 400
    save_minutes: float | None = None
    keep_snapshots: int = 3
    profile_steps: int | None = None
    run_dir: str = "runs/default"
    snapshot_path: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_steps", "micro_batch_size", "sample_every", "profile_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} is {getattr(self, name)}, must be null or at least 1")
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError(
                "trainer.max_epochs and trainer.max_steps are both null; set one, or training would not end"
            )
        for name in ("batch_size", "log_every", "eval_every", "save_every", "keep_snapshots"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} is {getattr(self, name)}, must be at least 1")
        if self.save_minutes is not None and self.save_minutes <= 0:
            raise ValueError(f"trainer.save_minutes is {self.save_minutes}, must be null or above 0")
        if self.threads != "auto" and self.threads < 1:
            raise ValueError(f"trainer.threads is {self.threads}, must be auto or at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"trainer.seed is {self.seed}, must be at least 0 and below 2**63")


class Trainer:
    """One run on one rank.

    Args:
        config: all sections
        world: the ranks

    Raises:
        UserError: text, folders or the snapshot to go on from do not fit.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.say = say if world.rank == 0 else nothing
        knobs = config.trainer
        check_shares(config, world.size)
        self.run_dir = Path(knobs.run_dir)
        corpus = world.per_file_system(
            lambda: encode_corpus(config.data.path, self.run_dir / "cache", knobs.init_from, self.say)
        )
        world.check_same({"the text's SHA-256": corpus.sha256})
        world.agree(lambda: occupy(self.run_dir, self) if world.rank == 0 else None)
        training, validation = split(corpus, config.data)
        self.training = CharDataset(training, config.data.block_size, knobs.seed)
        self.validation = ValidationDataset(validation, config.data.block_size)
        self.total_samples = (knobs.max_epochs or 0) * len(self.training)  # 0: no limit

        self.folder = SnapshotFolder(knobs.snapshot_path or str(self.run_dir / "snapshots"), knobs.keep_snapshots)
        self.state = TrainingState(config, world, corpus, self.folder, self.training[[0]], self.say)
        self.last_step = self._last_step()
        self.held = Bytes(0, 0, 0)  # measured in the first step
        self.bad_step = torch.zeros((), device=self.state.strategy.device)
        self.unsaved = ""  # why the newest snapshot is not there
        members = world.gather(f"{platform.node()} {device_name(world.device)}")
        facts = self.state.reasons | {"memory": told(self.state.need, config, self.state.shape, world.size)}
        self.say(banner(config, members, world.backend, facts, corpus, self.training, self.last_step))
        self.say(summary(on_paper(self.state.shape)))
        for line in self.state.changes(self.last_step):
            self.say(line)
        kinds = sorted(set(world.gather(self.state.choices["hardware"])))
        if config.distributed.reduction == "tree" and len(kinds) > 1:
            self.say(
                f"ranks run on {' and '.join(kinds)}: distributed.reduction tree repeats its bits on one kind alone"
            )

    def fit(self) -> int:
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
        self.world.on_first(lambda: write_config(self.run_dir, self.state.plain_config))
        metrics = self.world.agree(self._open_metrics)
        trace = self.run_dir / f"trace-{self.world.rank}.json"
        with (
            closing(metrics),
            profiled(self.config.trainer.profile_steps, trace, self.say) as step_is_over,
            Stop() as stop,
        ):
            try:
                return self._train(metrics, stop, step_is_over)
            finally:
                self.state.writer.wait(GRACE)

    def _train(self, metrics: Metrics, stop: Stop, step_is_over: Callable[[], None]) -> int:
        knobs, state = self.config.trainer, self.state
        saved_at = time.monotonic()
        began, first_step = time.perf_counter(), state.step
        since, since_samples = began, state.samples
        while state.step < self.last_step:
            late: int = self.world.rank == 0 and time.monotonic() > saved_at + 60 * (knobs.save_minutes or math.inf)
            voted = self.world.vote(stop.signal, late)
            epoch = state.samples // len(self.training)
            losses, grad_norm, rate = self._step()
            log, evaluate, save = map(self._due, (knobs.log_every, knobs.eval_every, knobs.save_every))
            sample = knobs.sample_every is not None and self._due(knobs.sample_every)
            signalled, late = voted()
            save = bool(save or late or signalled)
            if self.world.device.type == "cpu" or log or evaluate or save:
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
                    world_size=self.world.size,
                    restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                )
                since, since_samples = now, state.samples
            if state.samples // len(self.training) > epoch:
                self.say(f"step {state.step}: epoch {epoch + 1} is over ({len(self.training):,} windows)")
            paused = time.perf_counter()
            val_loss = None
            if evaluate:
                val_loss = validation_loss(state, self.validation)
                metrics.evaluation(state.step, val_loss, time.perf_counter() - paused)
            if sample:
                metrics.sample(state.step, written_by(state))
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
        failures = self.world.wait_for(state.keepers, self.unsaved)
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
            return STATUS[signal.Signals(stopped)]
        self.say(
            f"done in {duration(time.perf_counter() - began)}: validation loss {val_loss:.4f}, "
            f"snapshot {self.folder.file(state.step)}\n{self._what_next()}"
        )
        return 0

    def _tell_what_was_written(self, metrics: Metrics) -> None:
        """Says what came of snapshots since it was last asked."""
        for step, val_loss, error, _ in self.state.what_was_written():
            if error is not None and not isinstance(error, UserError):
                raise error
            there = error is None or isinstance(error, NotPrunedError)
            self.unsaved = "" if there else str(error)
            if there:
                metrics.snapshot(step, path=self.folder.file(step), val_loss=val_loss)
            else:
                metrics.snapshot(step, error=self.unsaved)
            if error is not None:
                complain(f"step {step}: {error}; training goes on, and the next save tries again")

    def _tell_what_is_held(self) -> None:
        largest = max(self.world.gather(self.held), key=lambda held: held.total)
        peak = ""
        if self.world.device.type == "cuda":
            peak = f"; at the peak {size(torch.cuda.max_memory_allocated())}, activations included"
        self.say(f"memory measured, on the rank with most: {largest}{peak}")

    def _step(self) -> tuple[list[Tensor], Tensor, float]:
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
            self.held = held(strategy)
        strategy.optimizer.zero_grad(set_to_none=True)
        return losses, grad_norm, rate

    def _check_finite(self, mean_loss: float = 0.0) -> None:
        bad_step = int(self.bad_step) if math.isfinite(mean_loss) else self.state.step
        if bad_step:
            steps = self.folder.steps() if self.world.rank == 0 else []
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
        if self.world.rank:
            return NoMetrics()
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
