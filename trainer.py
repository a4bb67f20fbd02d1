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
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from char_dataset import CharDataset, ValidationDataset, encode_corpus, hash64, split
from distributed import World
from errors import UserError
from hardware import choose_precision, choose_threads, device_name
from metrics import Metrics, NoMetrics, duration, nothing, say, summary
from model import GPT, GPTConfig
from optimizer import State, adopt_state, build_optimizer, learning_rate, state_by_name
from snapshot import SnapshotFolder, check_fits

if TYPE_CHECKING:
    from main import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STOPS = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}  # signal -> exit status


def plain(config: Any) -> dict[str, Any]:
    """A configuration as plain dictionaries, lists, strings and numbers."""
    return yaml.safe_load(yaml.safe_dump(asdict(config)))


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
        seed: of initial weights, order and dropout
        log_every: steps between lines and rows of loss and speed
        eval_every: steps between losses over the whole validation text
        save_every: steps between snapshots
        keep_snapshots: how many of the newest stay, beside the best by validation loss
        run_dir: folder of the run: config.yaml, metrics.jsonl, snapshots/, and the encoded text in cache/
        snapshot_path: folder or fsspec URL of the snapshots; null: snapshots/ in run_dir
    """

    max_epochs: int | None = None
    max_steps: int | None = 4000
    batch_size: int = 12
    micro_batch_size: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    threads: int | Literal["auto"] = "auto"
    seed: int = 1
    log_every: int = 100
    eval_every: int = 500
    save_every: int = 500
    keep_snapshots: int = 3
    run_dir: str = "runs/default"
    snapshot_path: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_steps", "micro_batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} is {getattr(self, name)}, must be null or at least 1")
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError(
                "trainer.max_epochs and trainer.max_steps are both null; set one, or training would not end"
            )
        for name in ("batch_size", "log_every", "eval_every", "save_every", "keep_snapshots"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} is {getattr(self, name)}, must be at least 1")
        if self.threads != "auto" and self.threads < 1:
            raise ValueError(f"trainer.threads is {self.threads}, must be auto or at least 1")
        if self.seed < 0:
            raise ValueError(f"trainer.seed is {self.seed}, must be at least 0")


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
        if knobs.batch_size < world.size:
            raise UserError(
                f"trainer.batch_size is {knobs.batch_size}, fewer than the {world.size} ranks, and each needs a "
                f"sequence: raise it, or start at most {knobs.batch_size} processes"
            )
        self.run_dir = Path(knobs.run_dir)
        self.folder = SnapshotFolder(knobs.snapshot_path or str(self.run_dir / "snapshots"), knobs.keep_snapshots)

        self.corpus = world.per_file_system(lambda: encode_corpus(config.data.path, self.run_dir / "cache"))
        world.check_same({"the text's SHA-256": self.corpus.sha256})
        training, validation = split(self.corpus, config.data)
        self.training = CharDataset(training, config.data.block_size, knobs.seed)
        self.validation = ValidationDataset(validation, config.data.block_size)

        snapshot = world.agree(lambda: self.folder.newest(self.say) if world.rank == 0 else None)
        header = world.broadcast({k: v for k, v in (snapshot or {}).items() if k not in ("model", "optimizer")})
        if header:
            check_fits(header, plain(config), self.corpus.vocabulary)
        self.step, self.samples = header.get("step", 0), header.get("samples", 0)
        self.best = header.get("best", {"step": None, "val_loss": math.inf})
        self.total_samples = (knobs.max_epochs or 0) * len(self.training)
        self.saved_step = self.step if header else None
        self.last_step = self._last_step()

        made_with = header.get("choices", {})
        kept_threads = made_with.get("threads") if made_with.get("world_size") == world.size else None
        threads, why_threads = choose_threads(knobs.threads, world.local_size, kept_threads)
        torch.set_num_threads(threads)
        self.precision, why_precision = world.agree(
            lambda: choose_precision(knobs.precision, world.device, made_with.get("precision"))
        )
        self.choices = {"precision": self.precision, "threads": threads, "world_size": world.size}

        torch.manual_seed(knobs.seed)
        vocab_size = len(self.corpus.vocabulary)
        shape = GPTConfig(**asdict(config.model), vocab_size=vocab_size, block_size=config.data.block_size)
        self.model = GPT(shape).to(world.device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == "fp16")
        self.replica = world.replicate(self.model, config.distributed, lambda model: self._loss(model, [0]))
        if header:
            self._restore(header, snapshot)

        self.bad_step = torch.zeros((), device=world.device)
        self.signal = 0
        self.val_loss: float | None = None
        self._introduce(f"{self.precision} ({why_precision})", f"{threads} per rank ({why_threads})")

    def fit(self) -> int:
        """Trains to the last step, or until told to stop.

        Returns:
            exit status: 0 at the goal, 143 or 130 when stopped by a signal

        Raises:
            UserError: a loss is not finite, or a file can't be written.
        """
        if self.saved_step is not None and self.step >= self.last_step:
            self.say(
                f"already trained: {self.folder.file(self.step)} is at step {self.step}, and training ends at step "
                f"{self.last_step}. To go on, raise trainer.max_steps or trainer.max_epochs; to start anew, set "
                f"another trainer.run_dir.\n{self._how_to_sample()}"
            )
            return 0
        self.world.on_first(self._write_config)
        metrics = self.world.agree(self._open_metrics)
        with closing(metrics), self._listening():
            return self._train(metrics)

    def _train(self, metrics: Metrics) -> int:
        knobs = self.config.trainer
        began, first_step = time.perf_counter(), self.step
        since, since_samples = began, self.samples
        while self.step < self.last_step:
            stop_asked = self.world.vote(self.signal)
            epoch = self.samples // len(self.training)
            loss, grad_norm, rate = self._step()
            log, evaluate, save = map(self._due, (knobs.log_every, knobs.eval_every, knobs.save_every))
            stop = stop_asked()
            if self.world.device.type == "cpu" or log or evaluate or save or stop:
                self._check_finite()
            metrics.advance(self.step)
            if log:
                mean_loss = self.world.sum(loss).item()
                self._check_finite(mean_loss)
                now = time.perf_counter()
                metrics.train(
                    self.step,
                    seconds_per_step=(now - began) / (self.step - first_step),
                    loss=mean_loss,
                    learning_rate=rate,
                    grad_norm=grad_norm.item(),
                    tokens_per_second=(self.samples - since_samples) * self.config.data.block_size / (now - since),
                    world_size=self.world.size,
                    restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                )
                since, since_samples = now, self.samples
            if self.samples // len(self.training) > epoch:
                self.say(f"step {self.step}: epoch {epoch + 1} is over ({len(self.training):,} windows)")
            paused = time.perf_counter()
            self.val_loss = None
            if evaluate:
                self.val_loss = self._evaluate()
                metrics.evaluation(self.step, self.val_loss, time.perf_counter() - paused)
            if save or stop:
                metrics.row("snapshot", self.step, path=self._save(), val_loss=self.val_loss)
            since += time.perf_counter() - paused
            if stop:
                metrics.row("stop", self.step, signal=signal.Signals(stop).name)
                self.say(f"stopped by {signal.Signals(stop).name} at step {self.step}, saved; the same command goes on")
                return STOPS[signal.Signals(stop)]
        metrics.row("stop", self.step, signal=None)
        self.say(
            f"done in {duration(time.perf_counter() - began)}: validation loss {self.val_loss:.4f}, "
            f"snapshot {self.folder.file(self.step)}\n{self._how_to_sample()}"
        )
        return 0

    def _step(self) -> tuple[Tensor, Tensor, float]:
        """One optimizer step; returns this rank's part of the batch's mean loss, the gradient's norm and the rate."""
        knobs = self.config.optimizer
        count = self.config.trainer.batch_size
        if self.total_samples:
            count = min(count, self.total_samples - self.samples)
        loss = torch.zeros((), device=self.world.device)
        micro_batches = list(self._micro_batches(self.samples, count))
        for i, (numbers, weight) in enumerate(micro_batches, start=1):
            torch.manual_seed(int(hash64(self.config.trainer.seed, numbers.start)[0]))
            with self.world.exchange(self.replica, now=i == len(micro_batches)):
                part = self._loss(self.replica, numbers) * weight
                self.scaler.scale(part * self.world.size).backward()  # DDP divides by the number of ranks
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        parameters = list(self.model.parameters())
        grad_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if knobs.grad_norm_clip is not None:
            clip_grads_with_norm_(parameters, knobs.grad_norm_clip, grad_norm)
        self.step += 1
        self.samples += count
        rate = learning_rate(self.step, self.last_step, knobs)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not self.scaler.is_enabled():
            # From the first gradient on that is not finite, the optimizer leaves weights alone without asking the
            # device: the fused kernel reads found_inf, GradScaler's own way of making it skip. All ranks see one norm.
            broken = (self.bad_step == 0) & ~grad_norm.isfinite()
            self.bad_step = torch.where(broken, self.step, self.bad_step)
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = (self.bad_step > 0).float()  # type: ignore[attr-defined]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm, rate

    def _micro_batches(self, first: int, count: int) -> Iterator[tuple[range, float]]:
        """This rank's sample numbers in portions, and the weight of each portion in the mean over the whole batch.

        Every rank gets equally many, that of the largest share; a missing one is a dummy of weight zero.
        """
        share, largest = self.world.share(first, count), self.world.largest_share(count)
        size = self.config.trainer.micro_batch_size or largest
        for start in range(0, largest, size):
            numbers = share[start : start + size]
            yield numbers or range(first, first + 1), len(numbers) / count

    def _loss(self, model: nn.Module, numbers: Sequence[int]) -> Tensor:
        return self._forward(model, *self.training[numbers])

    def _forward(self, model: nn.Module, idx: Tensor, targets: Tensor) -> Tensor:
        device = self.world.device
        if device.type == "cuda":
            idx, targets = idx.pin_memory(), targets.pin_memory()
        idx, targets = idx.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, DTYPES[self.precision], enabled=self.precision != "fp32"):
            return model(idx, targets)[1]

    @torch.no_grad()
    def _evaluate(self) -> float:
        """The mean loss over the whole validation text, in nats per character: the same bits on any number of ranks.

        Batches have fixed bounds and are dealt out; each batch's loss travels on its own and they are added in order.
        """
        windows, size = len(self.validation), self.config.trainer.micro_batch_size or self.config.trainer.batch_size
        batches = [range(start, min(start + size, windows)) for start in range(0, windows, size)]
        losses = torch.zeros(len(batches), device=self.world.device)
        self.model.eval()
        for start in range(0, len(batches), self.world.size):
            mine = start + self.world.rank
            loss = self._forward(self.model, *self.validation[batches[mine if mine < len(batches) else 0]])
            if mine < len(batches):
                losses[mine] = loss
        self.model.train()
        losses = self.world.sum(losses).cpu().double()
        counts = torch.tensor([self.validation.count(batch) for batch in batches], dtype=torch.float64)
        return ((losses * counts).sum() / counts.sum()).item()

    def _check_finite(self, mean_loss: float = 0.0) -> None:
        bad_step = int(self.bad_step) if math.isfinite(mean_loss) else self.step
        if bad_step:
            newest = "none yet" if self.saved_step is None else self.folder.file(self.saved_step)
            knobs = self.config.optimizer
            raise UserError(
                f"step {bad_step}: the loss is not finite; no weight and no snapshot was touched by it. Newest snapshot: "
                f"{newest}. Lower optimizer.learning_rate ({knobs.learning_rate:g}) or optimizer.grad_norm_clip "
                f"({knobs.grad_norm_clip})"
            )

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.last_step

    def _save(self) -> str:
        if self.val_loss is not None and self.val_loss < self.best["val_loss"]:
            self.best = {"step": self.step, "val_loss": self.val_loss}
        path = self.world.on_first(lambda: self.folder.write(self._snapshot(), self.best["step"]))
        self.saved_step = self.step
        return path

    def _snapshot(self) -> dict[str, Any]:
        optimizer = state_by_name(self.model, self.optimizer)
        return {
            "step": self.step,
            "samples": self.samples,
            "model": {name: tensor.cpu() for name, tensor in self.model.state_dict().items()},
            "optimizer": {name: {k: v.cpu() for k, v in state.items()} for name, state in optimizer.items()},
            "scaler": self.scaler.state_dict(),
            "config": plain(self.config),
            "vocabulary": self.corpus.vocabulary,
            "val_loss": self.val_loss,
            "best": self.best,
            "choices": self.choices,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "text_sha256": self.corpus.sha256,
        }

    def _restore(self, header: dict[str, Any], snapshot: dict[str, Any] | None) -> None:
        """Takes weights and optimizer state from rank 0's snapshot, one tensor at a time."""
        state: State = {}
        if snapshot is not None:
            self.model.load_state_dict(snapshot["model"])
            state = snapshot["optimizer"]
        shapes = {name: {k: v.to("meta") for k, v in tensors.items()} for name, tensors in state.items()}
        shapes = self.world.broadcast(shapes)
        adopt_state(self.model, self.optimizer, state or shapes)
        self.world.send_from_first(self.model.state_dict().values())
        for tensors in state_by_name(self.model, self.optimizer).values():
            self.world.send_from_first(tensors.values())
        self.scaler.load_state_dict(header["scaler"])
        self.say(f"going on from {self.folder.file(self.step)}")
        if header["text_sha256"] != self.corpus.sha256:
            self.say(f"the text has changed: SHA-256 {header['text_sha256']} in the snapshot, now {self.corpus.sha256}")
        rate = learning_rate(self.step, self.last_step, self.config.optimizer)
        if not math.isclose(rate, header["learning_rate"], rel_tol=1e-6):
            self.say(
                f"the learning rate of step {self.step} was {header['learning_rate']:.3g}, "
                f"by the yaml it is now {rate:.3g}"
            )

    def _last_step(self) -> int:
        """The step that training ends with: max_steps, or the one in which max_epochs are over."""
        knobs = self.config.trainer
        ends = [] if knobs.max_steps is None else [knobs.max_steps]
        if self.total_samples:
            ends.append(self.step + max(0, -(-(self.total_samples - self.samples) // knobs.batch_size)))
        return min(ends)

    def _open_metrics(self) -> Metrics:
        if self.world.rank:
            return NoMetrics()
        metrics = Metrics(self.run_dir / "metrics.jsonl", self.step, self.last_step)
        metrics.row("start", self.step, samples=self.samples, **self.choices)
        return metrics

    def _write_config(self) -> None:
        try:
            beside = self.run_dir / "config.yaml.tmp"
            beside.write_text(yaml.safe_dump(plain(self.config), sort_keys=False))
            os.replace(beside, self.run_dir / "config.yaml")
        except OSError as error:
            raise UserError(f"trainer.run_dir: config.yaml can't be written to {self.run_dir}: {error}") from error

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Notes signals that ask to stop. Ranks agree on the step to stop at; nothing else happens in a handler."""

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number

        before = {number: signal.signal(number, note) for number in STOPS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _how_to_sample(self) -> str:
        return f"to sample it:  python sample.py --snapshot {shlex.quote(self.folder.file(self.step))}"

    def _introduce(self, precision: str, threads: str) -> None:
        """Says what runs where, and what to expect."""
        members = self.world.gather(f"{platform.node()} {device_name(self.world.device)}")
        for rank, member in enumerate(members):
            self.say(f"GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/{self.world.size}  {member}")
        knobs, T, text = self.config.trainer, self.config.data.block_size, len(self.corpus.tokens)
        epochs = self.last_step * knobs.batch_size / len(self.training)
        self.say(
            f"backend    {self.world.backend}\n"
            f"precision  {precision}\n"
            f"threads    {threads}\n"
            f"text       {self.config.data.path}: {text:,} characters, {len(self.corpus.vocabulary)} distinct; "
            f"{len(self.training.tokens):,} to train on, {len(self.validation.tokens):,} to validate\n"
            f"batch      {knobs.batch_size} sequences x {T} characters, all ranks together; "
            f"{self.last_step:,} steps = {epochs:.2f} epochs\n"
            f"run        {self.run_dir}: a snapshot every {knobs.save_every} steps; kill it at any time, "
            f"the same command goes on from the newest\n{summary(self.model)}"
        )
