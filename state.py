"""What is the state of a run, and how does it come back? Model, optimizer, progress, and what the machine chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mingpt.config import GPTConfig, config_to_dict
from mingpt.corpus import Corpus
from mingpt.distributed.process_group import DistributedContext
from mingpt.optimizer import learning_rate
from mingpt.parallel.data_parallel import DDP, Strategy
from mingpt.parallel.memory import check_memory, estimate_memory
from mingpt.parallel.tree_reduction import TreeReduction
from mingpt.snapshot.async_writer import AsyncSnapshotWriter, SaveResult
from mingpt.snapshot.manager import elect_writer_ranks, find_source_snapshot
from mingpt.snapshot.pretrained import adapt_weights, load_pretrained
from mingpt.snapshot.storage import PruneError, SnapshotStorage
from mingpt.utils.device import (
    check_compiler,
    choose_precision,
    choose_threads,
    device_kind,
    memory_per_rank,
    set_deterministic,
)
from mingpt.utils.errors import UserError
from mingpt.utils.progress import Say
from model import GPT, Stage

if TYPE_CHECKING:
    from mingpt.config import Config


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
        context: DistributedContext,
        corpus: Corpus,
        folder: SnapshotStorage,
        example: tuple[Tensor, Tensor],
        say: Say,
    ) -> None:
        self.config, self.context, self.corpus, self.folder = config, context, corpus, folder
        self.plain_config, self.say = config_to_dict(config), say
        self.writer = AsyncSnapshotWriter(folder)
        self.news: list[SaveResult] = []
        self.writer_ranks = elect_writer_ranks(context, folder)
        snapshot, self.holder, has_newest = find_source_snapshot(context, folder, self.writer_ranks, say)
        heavy = ("model", "optimizer")
        header = context.broadcast_object({k: v for k, v in (snapshot or {}).items() if k not in heavy}, self.holder)
        self.resumed: dict[str, Any] | None = header or None
        if header:
            check_fits(header, self.plain_config, corpus.vocabulary)
        self.step, self.samples = header.get("step", 0), header.get("samples", 0)
        self.best = header.get("best", {"step": None, "val_loss": math.inf})
        self._choose(header.get("choices", {}))

        vocab_size = len(corpus.vocabulary)
        shape = GPTConfig(**asdict(config.model), vocab_size=vocab_size, block_size=config.data.block_size)
        self.shape = shape
        self.need = context.run_on_rank0(
            lambda: estimate_memory(config, shape, context.world_size, self.precision, context.device.type)
        )
        room = memory_per_rank(context.device, context.local_world_size)
        context.raise_on_all_ranks(
            lambda: check_memory(
                self.need, config, shape, context.world_size, self.precision, context.device.type, room
            )
        )
        self.strategy = self._spread(example)
        self.reasons |= self.strategy.facts
        if header:
            weights, moments = (snapshot[key] for key in heavy) if snapshot else ({}, {})
            self.strategy.take(weights, moments, self.holder)
            self.strategy.scaler.load_state_dict(header["scaler"])
            if any(
                context.all_gather_object(context.rank in self.writer_ranks and not has_newest)
            ):  # so that the holder may be lost
                self._write(header["val_loss"], keep=context.rank in self.writer_ranks and not has_newest)
        else:
            weights = context.raise_on_all_ranks(lambda: self._first_weights(shape) if context.rank == 0 else {})
            self.strategy.take(weights, {}, 0)

    def _choose(self, kept: dict[str, Any]) -> None:
        knobs, context = self.config.trainer, self.context
        tree = self.config.distributed.reduction == "tree"
        # Threads decide the last bits, which only the same number of ranks can repeat, or the tree on one thread.
        kept_threads = kept["threads"] if kept.get("world_size") == context.world_size else None
        threads, why_threads = (
            (1, "reduction: tree") if tree else choose_threads(knobs.threads, context.local_world_size, kept_threads)
        )
        torch.set_num_threads(threads)
        self.precision, why = context.raise_on_all_ranks(
            lambda: choose_precision(knobs.precision, context.device, kept.get("precision"))
        )
        if self.config.distributed.cpu_offload and context.device.type != "cuda":
            raise UserError(
                f"distributed.cpu_offload is true, which needs a GPU to offload from; here is "
                f"{device_kind(context.device)}: set it to false"
            )
        if context.device.type == "cuda" and tree and not knobs.deterministic:
            raise UserError("trainer.deterministic is false, must be true with distributed.reduction tree on GPUs")
        if tree and self.precision == "fp16":
            raise UserError(
                "trainer.precision is fp16, kept from the snapshot; with distributed.reduction tree set bf16 or fp32"
            )
        if knobs.deterministic:
            set_deterministic(context.device)
        self.choices: dict[str, Any] = {
            "precision": self.precision,
            "threads": threads,
            "world_size": context.world_size,
            "hardware": device_kind(context.device),
        }
        self.reasons = {"precision": f"{self.precision} ({why})", "threads": f"{threads} per rank ({why_threads})"}
        if knobs.compile:
            self.reasons["compile"] = (
                "each new shape of a batch is compiled first, a half-minute or so on CPUs; after how many steps that "
                "pays: python bench.py compile"
            )

    def _spread(self, example: tuple[Tensor, Tensor]) -> Strategy:
        stages = self.config.distributed.pipeline_stages
        if stages == 1:
            model = self._model(lambda: GPT(self.shape))
            return self._strategy(model, self.context, lambda strategy: strategy.loss(strategy.model, *example))
        from mingpt.parallel.pipeline import PipelineParallel, mesh, stage_io  # noqa: PLC0415 - takes most of a second

        replicas, replica, ends = mesh(self.context, stages)
        received, _ = stage_io(self.shape, 1, replica.rank, stages)

        def warm_up(strategy: Strategy) -> Tensor:
            with strategy.autocast():
                return strategy.model(torch.zeros_like(received, device=self.context.device)).sum()

        inner = self._strategy(self._model(lambda: Stage(self.shape, replica.rank, stages)), replicas, warm_up)
        return PipelineParallel(inner, self.context, replica, ends, self.config, self.shape)

    def _model(self, make: Callable[[], Stage]) -> Stage:
        """On the meta device: no rank but one ever needs to hold all of it."""
        knobs = self.config.trainer
        if knobs.compile:
            self.context.raise_on_all_ranks(lambda: check_compiler(self.context.device))
            torch._dynamo.config.optimize_ddp = False  # it cuts graphs at DDP's buckets; a block is a graph already
            torch._dynamo.config.recompile_limit = 64  # shares, short last batches and evaluation have their own shapes
        with torch.device("meta"):
            model = make()
        for block in model.blocks:
            block.recompute = knobs.activation_checkpointing
            if knobs.compile:  # forward alone: names stay, and so do hooks. Each shape has its own kernels and bits
                block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
        return model

    def _strategy(self, model: Stage, context: DistributedContext, warm_up: Callable[[Strategy], Tensor]) -> Strategy:
        """What these ranks, which have the same model, hold of it and exchange."""
        knobs, common = self.config.distributed, (model, context, self.config, self.precision)
        if knobs.reduction == "tree":
            return TreeReduction(*common)
        if knobs.strategy in ("zero2", "fsdp"):
            from mingpt.parallel.sharded import FSDP  # noqa: PLC0415 - takes most of a second

            return FSDP(*common)
        if context.world_size == 1:
            return Strategy(*common)
        kind: type[DDP] = DDP
        if knobs.strategy == "zero1":
            from mingpt.parallel.sharded import ZeRO1  # noqa: PLC0415

            kind = ZeRO1
        return kind(*common, warm_up)

    def _first_weights(self, shape: GPTConfig) -> dict[str, Tensor]:
        torch.manual_seed(self.config.trainer.seed)
        path = self.config.trainer.init_from
        if path is None:
            return GPT(shape).state_dict()
        old = load_pretrained(path, "trainer.init_from", self.say)
        new = set(self.corpus.vocabulary).difference(old.vocabulary)
        self.say(f"starting from the weights of {path}, with {len(new)} new characters {''.join(sorted(new))!r}")
        return adapt_weights(old, shape, self.corpus.vocabulary, path)

    def changes(self, last_step: int) -> Iterator[str]:
        """What the person watching should know of a run that goes on: from where, and what is other than before."""
        if self.resumed is None:
            return
        yield f"going on from {self.folder.file(self.step)}"
        text = self.resumed["text_sha256"]
        if text != self.corpus.sha256:
            yield f"the text has changed: its SHA-256 is {text} in the snapshot, {self.corpus.sha256} now"
        before, device = self.resumed["choices"].get("hardware"), self.choices["hardware"]
        if before != device:
            yield f"the hardware has changed: {before} made the snapshot, {device} goes on, and last bits may differ"
        then, now = self.resumed["learning_rate"], learning_rate(self.step, last_step, self.config.optimizer)
        if not math.isclose(then, now, rel_tol=1e-6):
            yield f"the learning rate of step {self.step} was {then:.3g}, by the yaml it is now {now:.3g}"

    def save(self, val_loss: float | None, last: bool) -> None:
        """Starts to write a snapshot; what comes of it, the writer tells.

        Args:
            val_loss: validation loss at this step, if there was one
            last: whether the run ends with this step
        """
        # Other ranks wait in a collective, which has a timeout; but the last save waits for as long as it takes.
        patience = self.config.distributed.timeout_seconds / 2
        ready = self.writer.wait(patience)
        while last and not all(self.context.all_gather_object(ready)):
            ready = self.writer.wait(patience)
        if not ready:
            late = UserError(
                f"trainer.snapshot_path: the snapshot before is still being written to {self.folder.path} after "
                f"{patience:g} seconds; this one is left out: raise trainer.save_every if that happens often"
            )
            self.news.append(SaveResult(self.step, val_loss, late, self.best))
        self.news += self._written()
        self._write(val_loss, keep=ready and self.context.rank in self.writer_ranks)

    def what_was_written(self) -> list[SaveResult]:
        """What has come of snapshots since it was last asked for."""
        told, self.news = self.news + self._written(), []
        return told

    def _written(self) -> list[SaveResult]:
        news = self.writer.poll()
        for written in news:
            if written.error is None or isinstance(written.error, PruneError):
                self.best = written.best
        return news

    def _write(self, val_loss: float | None, keep: bool) -> None:
        if keep:
            self.writer.save(self._header(val_loss), self.strategy.state())
        elif self.strategy.parts:  # the others need this rank's
            for _ in self.strategy.state():
                pass

    def _header(self, val_loss: float | None) -> dict[str, Any]:
        best = self.best
        if val_loss is not None and val_loss < best["val_loss"]:
            best = {"step": self.step, "val_loss": val_loss}
        return {
            "step": self.step,
            "samples": self.samples,
            "scaler": self.strategy.scaler.state_dict(),
            "config": self.plain_config,
            "vocabulary": self.corpus.vocabulary,
            "val_loss": val_loss,
            "best": best,
            "choices": self.choices,
            "learning_rate": self.strategy.optimizer.param_groups[0]["lr"],
            "text_sha256": self.corpus.sha256,
        }


def check_fits(header: dict[str, Any], config: dict[str, Any], vocabulary: str) -> None:
    """Makes sure that a snapshot's weights are of the model that is asked for; other keys may differ.

    Args:
        header: the snapshot, with or without its weights
        config: the five sections that run now, as plain dictionaries
        vocabulary: of the text that is trained on now

    Raises:
        UserError: a key that decides the weights' shapes or meaning, or the vocabulary, differs.
    """
    keys = [("model", key) for key in config["model"] if key != "dropout"]
    keys += [("data", "block_size"), ("optimizer", "name")]
    for section, key in keys:
        # Only optimizer.name may be missing: snapshots from before there was a choice are AdamW's.
        now, then = config[section][key], header["config"][section].get(key, "adamw")
        if now != then:
            raise UserError(
                f"{section}.{key} is {now}, but {then} in the snapshot of step {header['step']} in the run folder: "
                f"set it to {then} to go on, or set another trainer.run_dir to start anew"
            )
    known = header["vocabulary"]
    if vocabulary != known:
        new, old = (
            "".join(c for c in mine if c not in other) for mine, other in ((vocabulary, known), (known, vocabulary))
        )
        raise UserError(
            f"data.path: the text has {len(vocabulary)} distinct characters, but the snapshot of step {header['step']} "
            f"in the run folder {len(known)} (only in the text: {new!r}; only in the snapshot: {old!r}): "
            "use the snapshot's text to go on, or set another trainer.run_dir to start anew"
        )
