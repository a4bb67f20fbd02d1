"""What is the state of a run, and how does it come back? Model, optimizer, progress, and what the machine chose."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from corpus import Corpus
from distributed import World
from errors import UserError
from hardware import choose_precision, choose_threads, repeat_bits
from metrics import Say
from model import GPT, GPTConfig
from optimizer import adopt_state, build_optimizer, state_by_name
from reduction import Fast, Reduction, Tree
from snapshot import SnapshotFolder, check_fits

if TYPE_CHECKING:
    from main import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain(config: Any) -> dict[str, Any]:
    """A configuration as plain dictionaries, lists, strings and numbers."""
    return yaml.safe_load(yaml.safe_dump(asdict(config), sort_keys=False))


class TrainingState:
    """A fresh run's state, or that of the newest snapshot.

    Attributes `step` and `samples` are all the progress there is: finished optimizer steps and sequences.

    Args:
        config: all sections
        world: the ranks
        corpus: the text
        folder: the snapshots
        example: inputs and targets, (B, T) each, for a throw-away step
        say: what tells the person watching about damaged snapshots

    Raises:
        UserError: the snapshot is of another model, or of other characters than the text's.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        corpus: Corpus,
        folder: SnapshotFolder,
        example: tuple[Tensor, Tensor],
        say: Say,
    ) -> None:
        self.config, self.world, self.corpus, self.folder = config, world, corpus, folder
        snapshot = world.agree(lambda: folder.newest(say) if world.rank == 0 else None)
        header = world.broadcast({k: v for k, v in (snapshot or {}).items() if k not in ("model", "optimizer")})
        self.resumed: dict[str, Any] | None = header or None
        if header:
            check_fits(header, plain(config), corpus.vocabulary)
        self.step, self.samples = header.get("step", 0), header.get("samples", 0)
        self.best = header.get("best", {"step": None, "val_loss": math.inf})
        self.saved_step = self.step if header else None
        self._choose(header.get("choices", {}))

        torch.manual_seed(config.trainer.seed)
        shape = asdict(config.model) | {"vocab_size": len(corpus.vocabulary), "block_size": config.data.block_size}
        self.model = GPT(GPTConfig(**shape)).to(world.device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == "fp16")
        self.reduction: Reduction = (
            Tree(self.model, world)
            if config.distributed.reduction == "tree"
            else Fast(self.model, world, config.distributed.bucket_cap_mb, lambda model: self.loss(model, *example))
        )
        if header:
            self._restore(header, snapshot)

    def _choose(self, kept: dict[str, Any]) -> None:
        knobs, world = self.config.trainer, self.world
        tree = self.config.distributed.reduction == "tree"
        # Threads decide the last bits, which only the same number of ranks can repeat, or the tree on one thread.
        kept_threads = kept["threads"] if kept.get("world_size") == world.size else None
        threads, why_threads = (
            (1, "reduction: tree") if tree else choose_threads(knobs.threads, world.local_size, kept_threads)
        )
        torch.set_num_threads(threads)
        self.precision, why = world.agree(
            lambda: choose_precision(knobs.precision, world.device, kept.get("precision"))
        )
        if world.device.type == "cuda" and tree and not knobs.deterministic:
            raise UserError("trainer.deterministic is false, must be true with distributed.reduction tree on GPUs")
        if tree and self.precision == "fp16":
            raise UserError(
                "trainer.precision is fp16, kept from the snapshot; distributed.reduction tree needs bf16 or fp32"
            )
        if knobs.deterministic:
            repeat_bits(world.device)
        self.choices = {"precision": self.precision, "threads": threads, "world_size": world.size}
        self.reasons = {"precision": f"{self.precision} ({why})", "threads": f"{threads} per rank ({why_threads})"}

    def _restore(self, header: dict[str, Any], snapshot: dict[str, Any] | None) -> None:
        """Takes weights and optimizer state from rank 0's snapshot, one tensor at a time."""
        if snapshot is not None:
            self.model.load_state_dict(snapshot["model"])
        tensors = {} if snapshot is None else snapshot["optimizer"]
        shapes = {name: {k: v.to("meta") for k, v in state.items()} for name, state in tensors.items()}
        shapes = self.world.broadcast(shapes)
        adopt_state(self.model, self.optimizer, tensors or shapes)
        self.world.send_from_first(self.model.state_dict().values())
        for state in state_by_name(self.model, self.optimizer).values():
            self.world.send_from_first(state.values())
        self.scaler.load_state_dict(header["scaler"])

    def loss(self, model: nn.Module, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of (B, T) inputs and targets, on the device and in the precision of this run."""
        device = self.world.device
        if device.type == "cuda":  # copies from pinned memory don't wait
            idx, targets = idx.pin_memory(), targets.pin_memory()
        idx, targets = idx.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, DTYPES[self.precision], enabled=self.precision != "fp32"):
            return model(idx, targets)[1]

    def save(self, val_loss: float | None) -> str:
        """Writes a snapshot; returns its path.

        Args:
            val_loss: validation loss at this step, if there was one

        Raises:
            UserError: it can't be written, or the weights are not finite.
        """
        if not get_total_norm(list(self.model.parameters())).isfinite():
            raise UserError(
                f"step {self.step}: its update made weights that are not finite; no snapshot of them is written. "
                f"Lower optimizer.learning_rate ({self.config.optimizer.learning_rate:g})"
            )
        if val_loss is not None and val_loss < self.best["val_loss"]:
            self.best = {"step": self.step, "val_loss": val_loss}
        path = self.world.on_first(lambda: self.folder.write(self._snapshot(val_loss), self.best["step"]))
        self.saved_step = self.step
        return path

    def _snapshot(self, val_loss: float | None) -> dict[str, Any]:
        optimizer = state_by_name(self.model, self.optimizer)
        return {
            "step": self.step,
            "samples": self.samples,
            "model": {name: tensor.cpu() for name, tensor in self.model.state_dict().items()},
            "optimizer": {name: {k: v.cpu() for k, v in state.items()} for name, state in optimizer.items()},
            "scaler": self.scaler.state_dict(),
            "config": plain(self.config),
            "vocabulary": self.corpus.vocabulary,
            "val_loss": val_loss,
            "best": self.best,
            "choices": self.choices,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "text_sha256": self.corpus.sha256,
        }
