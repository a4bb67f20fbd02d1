"""Decides which ranks write snapshots and when, and finds the snapshot to resume from."""

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt.config.schema import Config
from mingpt.distributed.agreement import all_gather_object, broadcast_object, reduce_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import saved_steps
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.format import check_header, split_header
from mingpt.snapshot.interval import SaveInterval
from mingpt.snapshot.load import new_run_advice
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.snapshot.writer import AsyncSnapshotWriter, SaveResult
from mingpt.system.run_lock import RunLock

EXCHANGE_SECONDS = 0.5  # interval between exchanges of ranks that wait for saves, below distributed.timeout_seconds


@dataclass(frozen=True)
class NewestSnapshot:
    """The newest snapshot that any rank has.

    Attributes:
        header: the snapshot without its tensors, on all ranks
        content: the whole snapshot on the rank that has loaded it; empty on other ranks
        source_rank: the rank that has loaded it
        path: its file on that rank
        is_missing: this rank writes snapshots, and does not have this one
    """

    header: dict[str, Any]
    content: dict[str, Any]
    source_rank: int
    path: str
    is_missing: bool


class SnapshotManager:
    """The snapshots of a run. All ranks build it together: they elect the ranks that write, and start their threads.

    Raises:
        UserError: a rank can't write to its folder of snapshots.
    """

    def __init__(self, config: Config, context: DistributedContext, lock: RunLock) -> None:
        self.config = config
        self.context = context
        self.lock = lock
        local_path = f"{config.trainer.run_dir}/snapshots"
        self.storage = SnapshotStorage(config.trainer.snapshot_path or local_path, config.trainer.keep_snapshots)
        # An upload may take longer than the interval between frequent snapshots, and stores charge for each request.
        if self.storage.is_local:
            local_path = self.storage.path
        self.frequent = SnapshotStorage(local_path, keep=2, is_frequent=True)
        self.max_wait = config.distributed.timeout_seconds / 2  # while other ranks wait in a collective
        self.writer = AsyncSnapshotWriter(self.frequent, lock)
        self.writer_ranks = elect_writer_ranks(context, self.storage)
        self.frequent_writer_ranks = self.writer_ranks
        if not self.storage.is_local:
            self.frequent_writer_ranks = elect_writer_ranks(context, self.frequent)
        self.interval = SaveInterval(config.trainer.save_overhead)
        self.training_seconds = 0.0  # up to the previous step
        self.has_warned = False  # about a frequent snapshot that could not be written

    def load_newest(self) -> NewestSnapshot | None:
        """Loads the newest snapshot that any rank has. Returns None if there are no snapshots.

        Raises:
            UserError: all snapshots are damaged, or there are none although metrics.jsonl lists some.
        """
        context = self.context
        content: dict[str, Any] = {}
        failure = ""
        path = ""
        for storage, ranks in ((self.frequent, self.frequent_writer_ranks), (self.storage, self.writer_ranks)):
            if context.rank not in ranks:
                continue
            try:
                found = storage.load_newest(first_step=content.get("step", 0))
            except UserError as error:
                failure = str(error)
                continue
            if found is not None:
                content = found
                path = storage.file(content["step"])
        step = content.get("step", -1)
        with context.long_timeout():  # it may be large and far away
            steps = all_gather_object(context, step)
        newest_step = max(steps)
        source_rank = steps.index(newest_step)
        with shared_errors(context):
            if failure and newest_step < 0:
                raise UserError(failure)
        if failure:
            logger.warning(failure)
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
        """Raises a UserError if this run did have snapshots: a new start would remove the rows of their steps."""
        metrics_file = Path(self.config.trainer.run_dir) / "metrics.jsonl"
        with shared_errors(self.context):
            saved = saved_steps(metrics_file) if self.context.rank == 0 else []
            if saved:
                raise UserError(
                    f"trainer.snapshot_path: there is no snapshot in {self.storage.path}, but according to "
                    f"{metrics_file} this run has saved {len(saved)}, the last at step {saved[-1]}: mount the disk, or "
                    f"copy the snapshots there; to start again from step 0, {new_run_advice(self.config)}"
                )

    def restore(self, newest: NewestSnapshot, strategy: Strategy) -> None:
        """Loads the tensors of the newest snapshot. Writer ranks that do not have it save a copy."""
        content = newest.content
        with shared_errors(self.context):
            if content and content["optimizer"].keys() != content["model"].keys():
                raise UserError(
                    f"trainer.snapshot_path: {newest.path} has an optimizer state for {len(content['optimizer'])} of "
                    f"{len(content['model'])} parameters, and must have one for all: move it away, or start a new run "
                    "with it as trainer.init_from"
                )
        strategy.load_full_state(content.get("model", {}), content.get("optimizer", {}), newest.source_rank)
        if newest.header["scaler"]:  # it is empty unless the run that saved it used fp16
            strategy.scaler.load_state_dict(newest.header["scaler"])
        if reduce_object(self.context, newest.is_missing, any):
            self._start(newest.header, strategy, self.storage, newest.is_missing)

    def is_frequent_due(self, training_seconds: float) -> bool:
        """Returns whether to save a frequent snapshot after the next step. All ranks call it, and rank 0 decides.

        Args:
            training_seconds: time since the start, without pauses
        """
        is_writing = not self.writer.is_idle.is_set()
        self.interval.add_step(training_seconds - self.training_seconds, is_writing)
        self.training_seconds = training_seconds
        return self.context.rank == 0 and self.interval.is_due()

    def save(self, header: dict[str, Any], strategy: Strategy, is_frequent: bool, is_last: bool) -> None:
        """Starts to write a snapshot. `poll` returns the result.

        Args:
            header: the snapshot without `model`, `optimizer` and `scaler`; its `best` is the best one so far
            is_frequent: do not keep the snapshot, and skip it if the previous one is still being written
            is_last: the run ends with this step, so wait for the previous save as long as it takes
        """
        if is_last:
            self.wait_for_saves()
        is_ready = self.writer.is_idle.wait(0.0 if is_frequent else self.max_wait)
        began = time.perf_counter()
        best = header["best"]
        for result in list(self.writer.results):  # the previous save may have ended since `poll`
            best = result.best if result.error is None else best
        is_best = header["val_loss"] is not None and header["val_loss"] < best["val_loss"]
        if is_best and not is_frequent:
            best = {"step": header["step"], "val_loss": header["val_loss"]}
        header = header | {"scaler": strategy.scaler.state_dict(), "best": best}
        storage, writer_ranks = self.storage, self.writer_ranks
        if is_frequent:
            storage, writer_ranks = self.frequent, self.frequent_writer_ranks
        check_header(header, storage.file(header["step"]))  # the same on all ranks
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
        """Returns the results of saves since the last call, and warns of errors.

        It does not warn if a folder is lost, since the trainer is about to end the run.

        Raises:
            Exception: a save has failed with an error that is not a UserError.
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
        """Deletes the frequent snapshots of a run that has ended, unless one of them is the newest of all."""
        if self.context.rank not in self.frequent_writer_ranks:
            return
        with suppress(UserError):
            if max(self.frequent.steps(), default=0) <= max(self.storage.steps(), default=0):
                self.frequent.remove()

    def wait_for_saves(self) -> None:
        """Waits until no rank is writing a snapshot, however long it takes."""
        while not reduce_object(self.context, self.writer.is_idle.wait(EXCHANGE_SECONDS), all):
            pass

    def _start(self, header: dict[str, Any], strategy: Strategy, storage: SnapshotStorage, writes: bool) -> None:
        if writes:
            self.writer.save(header, strategy.iter_full_state(), storage)
        elif strategy.is_sharded:  # other ranks need the shards of this one
            for _ in strategy.iter_full_state():
                pass


def elect_writer_ranks(context: DistributedContext, storage: SnapshotStorage) -> list[int]:
    """Returns one rank for each snapshot folder: the first of the ranks that share the folder.

    Rank 0 and the first rank of each other machine put a marker into their folder, and look for each other's.

    Raises:
        UserError: a rank can't write.
    """
    marker = uuid.uuid4().hex if context.local_rank == 0 or context.rank == 0 else ""
    with shared_errors(context):
        if marker:
            storage.put_marker(marker)
    markers = all_gather_object(context, marker)
    with shared_errors(context):
        found = storage.markers() if marker else set()
    is_writer = marker != "" and not found.intersection(markers[: context.rank])
    writes = all_gather_object(context, is_writer)  # now all ranks have looked
    if marker:
        storage.remove_marker(marker)
    return [rank for rank, each in enumerate(writes) if each]
