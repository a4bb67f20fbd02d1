"""Which ranks write snapshots, when, and which one is resumed from."""

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mingpt.config.schema import Config, config_to_dict
from mingpt.config.yaml_format import format_value
from mingpt.distributed.agreement import broadcast_object, reduce_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import saved_steps
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.format import KEPT_KEYS, check_header, split_header
from mingpt.snapshot.interval import SaveInterval
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.snapshot.writer import AsyncSnapshotWriter, SaveResult
from mingpt.system.run_lock import RunLock
from mingpt.text.corpus import show_characters

EXCHANGE_SECONDS = 0.5  # between exchanges of ranks that wait for saves; distributed.timeout_seconds is longer


@dataclass(frozen=True)
class NewestSnapshot:
    """The newest snapshot that any rank has.

    Attributes:
        header: all but its tensors, on all ranks
        content: with its tensors, on the rank that has loaded it; empty on others
        source_rank: that rank
        path: its file there
        is_missing: this rank writes snapshots, and does not have this one
    """

    header: dict[str, Any]
    content: dict[str, Any]
    source_rank: int
    path: str
    is_missing: bool


class SnapshotManager:
    """The snapshots of a run, on all its ranks.

    Raises:
        UserError: a rank that should write can't.
    """

    def __init__(self, config: Config, context: DistributedContext, lock: RunLock) -> None:
        self.config = config
        self.context = context
        self.lock = lock
        local_path = f"{config.trainer.run_dir}/snapshots"
        self.storage = SnapshotStorage(config.trainer.snapshot_path or local_path, config.trainer.keep_snapshots)
        # An upload may take longer than the interval between frequent snapshots, and each request to a store is paid.
        if self.storage.is_local:
            local_path = self.storage.path
        self.frequent = SnapshotStorage(local_path, keep=2, is_frequent=True)
        self.max_wait = config.distributed.timeout_seconds / 2  # other ranks wait in a collective meanwhile
        self.writer = AsyncSnapshotWriter(self.frequent, lock)
        self.writer_ranks = elect_writer_ranks(context, self.storage)
        self.frequent_writer_ranks = self.writer_ranks
        if not self.storage.is_local:
            self.frequent_writer_ranks = elect_writer_ranks(context, self.frequent)
        self.interval = SaveInterval(config.trainer.save_overhead)
        self.training_seconds = 0.0  # at the step before
        self.has_warned = False  # of a frequent snapshot that could not be written

    def load_newest(self) -> NewestSnapshot | None:
        """Loads the newest snapshot that any rank has; None if none has one.

        Raises:
            UserError: there are snapshots, and all are damaged; or there should be some, according to metrics.jsonl.
        """
        context = self.context
        content: dict[str, Any] = {}
        failure = ""
        messages: list[str] = []
        prefix = f"rank {context.rank}: " if context.rank else ""
        path = ""
        for storage, ranks in ((self.frequent, self.frequent_writer_ranks), (self.storage, self.writer_ranks)):
            if context.rank not in ranks:
                continue
            try:
                found = storage.load_newest(lambda message: messages.append(prefix + message), content.get("step", 0))
            except UserError as error:
                failure = f"{prefix}{error}"
                messages.append(failure)
                continue
            if found is not None:
                content = found
                path = storage.file(content["step"])
        step = content.get("step", -1)
        with context.without_timeout():  # it may be large, and far away
            newest_step, source_rank, messages, failure = reduce_object(
                context, (step, messages, failure), _find_newest
            )
        for message in messages:
            logger.info(message)
        if failure and newest_step < 0:
            raise UserError(failure)
        if len(self.writer_ranks) > 1:
            logger.info(
                f"snapshots are written by ranks {self.writer_ranks}, which share no folder; "
                f"the newest is rank {source_rank}'s"
            )
        if newest_step < 0:
            self._check_new()
            return None
        header, path = broadcast_object(context, (split_header(content), path), source_rank)
        is_missing = context.rank in self.writer_ranks and step < newest_step
        if context.rank != source_rank:
            content = {}
        return NewestSnapshot(header, content, source_rank, path, is_missing)

    def _check_new(self) -> None:
        """Raises a UserError if this run, which has no snapshot, has had one: its rows would be removed."""
        metrics_file = Path(self.config.trainer.run_dir) / "metrics.jsonl"
        with shared_errors(self.context):
            saved = saved_steps(metrics_file) if self.context.rank == 0 else []
            if saved:
                raise UserError(
                    f"trainer.snapshot_path: there is no snapshot in {self.storage.path}, but according to "
                    f"{metrics_file} this run has saved {len(saved)}, the last at step {saved[-1]}: mount the disk, or "
                    f"copy the snapshots there; to start anew, {new_run_advice(config_to_dict(self.config))}"
                )

    def newest_file(self) -> str:
        """Names the newest snapshot in a message of rank 0."""
        if self.context.rank > 0:
            return ""
        files = {step: storage.file(step) for storage in (self.frequent, self.storage) for step in storage.steps()}
        return files[max(files)] if files else "none yet"

    def restore(self, newest: NewestSnapshot, strategy: Strategy) -> None:
        """Loads the tensors of the newest snapshot, and copies it to writer ranks that do not have it."""
        content = newest.content
        with shared_errors(self.context):
            if content and content["optimizer"].keys() != content["model"].keys():
                raise UserError(
                    f"trainer.snapshot_path: {newest.path} has an optimizer state for {len(content['optimizer'])} of "
                    f"{len(content['model'])} parameters, and must have one for all: move it away, or begin a new run "
                    "with it as trainer.init_from"
                )
        strategy.load_full_state(content.get("model", {}), content.get("optimizer", {}), newest.source_rank)
        if newest.header["scaler"]:  # empty if the run that saved it was not in fp16
            strategy.scaler.load_state_dict(newest.header["scaler"])
        if reduce_object(self.context, newest.is_missing, any):
            self._start(newest.header, strategy, self.storage, newest.is_missing)

    def is_frequent_due(self, training_seconds: float) -> bool:
        """Whether a frequent snapshot is to be saved after the next step. Rank 0 decides; all ranks call it.

        Args:
            training_seconds: since the start, as `StepTimer` counts them
        """
        is_writing = not self.writer.is_idle.is_set()
        self.interval.add_step(training_seconds - self.training_seconds, is_writing)
        self.training_seconds = training_seconds
        return self.context.rank == 0 and self.interval.is_due()

    def save(self, header: dict[str, Any], strategy: Strategy, is_frequent: bool, is_last: bool) -> None:
        """Starts to write a snapshot; `poll` returns the result.

        Args:
            header: the snapshot without `model`, `optimizer` and `scaler`; its `best` is the best one so far
            is_frequent: it is not kept, and skipped where the one before is still being written
            is_last: the run ends with this step, so the save waits for the one before as long as it takes
        """
        if is_last:
            self.wait_for_saves()
        is_ready = self.writer.wait(0.0 if is_frequent else self.max_wait)
        began = time.perf_counter()
        best = header["best"]
        for result in list(self.writer.results):  # of the save before
            best = result.best if result.is_saved else best
        is_best = header["val_loss"] is not None and header["val_loss"] < best["val_loss"]
        if is_best and not is_frequent:
            best = {"step": header["step"], "val_loss": header["val_loss"]}
        header = header | {"scaler": strategy.scaler.state_dict(), "best": best}
        storage, writer_ranks = self.storage, self.writer_ranks
        if is_frequent:
            storage, writer_ranks = self.frequent, self.frequent_writer_ranks
        check_header(header, storage.file(header["step"]))  # all ranks have the same, and raise the same error
        writes = self.context.rank in writer_ranks
        if writes and not is_ready and not is_frequent:
            late = UserError(
                f"trainer.snapshot_path: the previous snapshot is still being written after {self.max_wait:g} seconds; "
                "this one is skipped: raise trainer.save_every if that happens often"
            )
            self.writer.add_result(header, storage, late)
        self._start(header, strategy, storage, is_ready and writes)
        self.interval.add_save(time.perf_counter() - began)

    def poll(self) -> list[SaveResult]:
        """Results of saves since the last call. An error of the writer that is no UserError is raised.

        An error is shown, unless it is that a folder is lost: then the trainer is about to end the run.
        """
        results = [self.writer.results.popleft() for _ in range(len(self.writer.results))]
        for result in results:
            if result.error is not None and not isinstance(result.error, UserError):
                raise result.error
            if result.error is None or (result.is_frequent and self.has_warned) or self.lock.lost_folder():
                continue
            self.has_warned |= result.is_frequent
            logger.warning(f"step {result.step}: {result.error}; training continues, and the next save tries again")
        return results

    def remove_frequent(self) -> None:
        """Deletes the frequent snapshots of a run that has ended, unless one is newer than all others."""
        if self.context.rank not in self.frequent_writer_ranks:
            return
        with suppress(UserError):
            if max(self.frequent.steps(), default=0) <= max(self.storage.steps(), default=0):
                self.frequent.remove()

    def wait_for_saves(self) -> None:
        """Waits until no rank is writing a snapshot, as long as that takes."""
        while not reduce_object(self.context, self.writer.wait(EXCHANGE_SECONDS), all):
            pass

    def _start(self, header: dict[str, Any], strategy: Strategy, storage: SnapshotStorage, writes: bool) -> None:
        if writes:
            self.writer.save(header, strategy.iter_full_state(), storage)
        elif strategy.is_sharded:  # other ranks need the shards of this one
            for _ in strategy.iter_full_state():
                pass


def _find_newest(found: list[tuple[int, list[str], str]]) -> tuple[int, int, list[str], str]:
    """From each rank's newest step, messages and failure: the newest step, its first rank, all messages, a failure."""
    steps, messages, failures = zip(*found, strict=True)
    newest = max(steps)
    return newest, steps.index(newest), list(chain(*messages)), next(filter(None, failures), "")


def elect_writer_ranks(context: DistributedContext, storage: SnapshotStorage) -> list[int]:
    """Returns rank 0, and the first rank of each machine that does not share rank 0's snapshot folder.

    Raises:
        UserError: one of them can't write.
    """
    marker = broadcast_object(context, uuid.uuid4().hex)
    with shared_errors(context):
        if context.rank == 0:
            storage.put_marker(marker)
    with shared_errors(context):
        is_apart = context.local_rank == 0 and not storage.has_marker(marker)
        if is_apart:
            storage.put_marker(marker)
    is_writer = context.rank == 0 or is_apart
    if is_writer:
        storage.remove_marker(marker)
    return reduce_object(context, is_writer, lambda writes: [rank for rank, each in enumerate(writes) if each])


def new_run_advice(config: dict[str, Any]) -> str:
    """What to set so that a new run finds no snapshot of this one."""
    if config["trainer"]["snapshot_path"] is None:
        return "set another trainer.run_dir"
    return "set another trainer.run_dir and trainer.snapshot_path"


def check_compatible(header: dict[str, Any] | None, config: dict[str, Any], vocabulary: str) -> None:
    """Checks that the snapshot that a run continues from fits its configuration and vocabulary.

    Args:
        header: None: the run is new

    Raises:
        UserError: the vocabulary differs, or a key that determines shapes or meaning of the tensors, or which part of
            the text is trained on, and in which order.
    """
    if header is None:
        return
    for name in KEPT_KEYS:
        section, key = name.split(".")
        now = config[section][key]
        then = header["config"][section][key]
        if now != then:
            shown = format_value(then)
            raise UserError(
                f"{name} is {format_value(now)}, but {shown} in the snapshot of step {header['step']} in the run "
                f"folder: set it to {shown} to resume, or {new_run_advice(config)} to start a new run"
            )
    known = header["vocabulary"]
    if vocabulary != known:
        new = set(vocabulary) - set(known)
        old = set(known) - set(vocabulary)
        raise UserError(
            f"data.path: the text has {len(vocabulary)} distinct characters, but the snapshot of step {header['step']} "
            f"in the run folder {len(known)} (only in the text: {show_characters(new)}; only in the snapshot: "
            f"{show_characters(old)}): use the snapshot's text to resume, or {new_run_advice(config)} to start a new "
            "run"
        )
