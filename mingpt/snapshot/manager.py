"""Decides which ranks write snapshots and when, and finds the snapshot to resume from."""

import time
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from mingpt.config.schema import Config
from mingpt.distributed.agreement import all_gather_object, broadcast_object, reduce_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import saved_steps
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.folder import open_folders
from mingpt.snapshot.format import split_header
from mingpt.snapshot.load import new_run_advice, weight_differences
from mingpt.snapshot.mirror import Mirror
from mingpt.snapshot.worker import SaveResult
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.system.run_lock import RunLock, read_holder

MIN_SECONDS = 1.0  # minimum time between two snapshots, even if saving is cheap
EXCHANGE_SECONDS = 0.5  # interval between exchanges of ranks that wait for saves, below distributed.timeout_seconds


class NewestSnapshot(NamedTuple):
    """The newest snapshot that any rank has.

    Attributes:
        header: the snapshot without its tensors, on all ranks
        content: the whole snapshot on the rank that has loaded it; empty on other ranks
        source_rank: the rank that has loaded it
        path: its file on that rank
    """

    header: dict[str, Any]
    content: dict[str, Any]
    source_rank: int
    path: str


class SnapshotManager:
    """The snapshots of a run. All ranks build it together.

    Rank 0 writes snapshots. So does the first rank of each other machine, unless it shares rank 0's folder.

    Raises:
        UserError: a rank can't write to its folder of snapshots.
    """

    def __init__(self, config: Config, context: DistributedContext, lock: RunLock) -> None:
        self.config = config
        self.context = context
        self.lock = lock
        self.folder, remote = open_folders(config.trainer)
        lock_id = broadcast_object(context, lock.id)
        self.writes = context.rank == 0 or (
            context.local_rank == 0 and read_holder(self.folder.root).get("id") != lock_id
        )
        with shared_errors(context):
            for folder in (self.folder, remote):
                if folder is not None and self.writes:
                    folder.make()
        self.mirror = Mirror(self.folder, remote) if remote is not None and context.rank == 0 else None
        self.writer = SnapshotWriter(self.folder, lock, self.mirror)
        self.overhead = config.trainer.save_overhead
        self.saved_at = time.monotonic()
        self.has_warned = False  # about an unscheduled snapshot that could not be written
        self.last_error = ""  # why the newest scheduled snapshot could not be saved; empty: it was saved

    def load_newest(self) -> NewestSnapshot | None:
        """Loads the newest snapshot that any rank has. Returns None if there are no snapshots.

        Raises:
            UserError: a snapshot can't be read and there is no other, or there are no whole ones although metrics.jsonl
                lists some.
        """
        context = self.context
        content: dict[str, Any] = {}
        path = ""
        failure = ""
        remote = [] if self.mirror is None else [self.mirror.remote]
        with context.long_timeout():  # loading a large snapshot may take long
            for folder in [self.folder, *remote] if self.writes else []:
                try:
                    newer = folder.load_newest(after=content.get("step", -1))
                except UserError as error:
                    failure = str(error)
                    continue
                if newer is not None:
                    content = newer
                    path = folder.file(content["step"])
            steps = all_gather_object(context, content.get("step", -1))
        source_rank = steps.index(max(steps))
        with shared_errors(context):
            if failure and max(steps) < 0:
                raise UserError(failure)
        if failure:
            logger.warning(failure)
        if max(steps) < 0:
            self._check_new()
            return None
        header, path = broadcast_object(context, (split_header(content), path), source_rank)
        if context.rank != source_rank:
            content = {}
        return NewestSnapshot(header, content, source_rank, path)

    def _check_new(self) -> None:
        """Raises a UserError if this run did save snapshots: a new start would remove the rows of their steps.

        If power fails before the first save of trainer.save_every, all snapshots may be damaged. Then the run begins
        again.
        """
        metrics_file = Path(self.config.trainer.run_dir) / "metrics.jsonl"
        with shared_errors(self.context):
            saved = saved_steps(metrics_file) if self.context.rank == 0 else []
            if saved:
                raise UserError(
                    f"trainer.snapshot_path: there is no whole snapshot in {self.folder.path} "
                    f"({len(self.folder.damaged)} damaged), but according to {metrics_file} this run has saved "
                    f"{len(saved)}, the last at step {saved[-1]}; mount the disk, or copy the snapshots there; to "
                    f"start again from step 0, {new_run_advice(self.config)}"
                )

    def restore(self, newest: NewestSnapshot, strategy: Strategy) -> None:
        """Loads the tensors of the newest snapshot, and deletes files that a killed run has left."""
        content = newest.content
        header = newest.header
        with shared_errors(self.context):
            if content and content["optimizer"].keys() != content["model"].keys():
                raise UserError(
                    f"trainer.snapshot_path: {newest.path} has an optimizer state for {len(content['optimizer'])} of "
                    f"{len(content['model'])} parameters, but must have one for all; move it away, or start a new run "
                    "with it as trainer.init_from"
                )
            if content and (differences := weight_differences(content["model"], strategy.full_shapes)):
                raise UserError(
                    f"trainer.snapshot_path: the weights in {newest.path} are not those of the model, whose code has "
                    f"changed: {differences}. To train it, {new_run_advice(self.config)}; with trainer.init_from "
                    f"{self.config.trainer.run_dir}, it begins with the weights that fit"
                )
        strategy.load_full_state(content.get("model", {}), content.get("optimizer", {}), newest.source_rank)
        if header["scaler"]:  # it is empty unless the run that saved it used fp16
            strategy.scaler.load_state_dict(header["scaler"])
        if self.writes:
            self.folder.resume(header)
        if self.mirror is not None:
            self.mirror.upload(header)  # the last upload may have failed

    def is_due(self) -> bool:
        """Returns whether to save a snapshot after the next step. All ranks must call it; rank 0 decides.

        It is due a second after the previous one, or later if saves would take more than `trainer.save_overhead` of the
        time.
        """
        if self.context.rank > 0 or self.overhead is None or not self.writer.wait(timeout=0):
            return False
        cost = fmean(self.writer.costs or [0.0])
        return time.monotonic() >= self.saved_at + max(MIN_SECONDS, cost / self.overhead)

    def save(self, header: dict[str, Any], strategy: Strategy, is_scheduled: bool) -> None:
        """Starts to write a snapshot. `poll` returns the result.

        If the previous snapshot is still being written, one that is kept waits for it, and any other is skipped.

        Args:
            header: the snapshot without its tensors and `scheduled`
            is_scheduled: whether trainer.save_every requires it, or the run ends with this step
        """
        step = header["step"]
        if is_scheduled or header["best"]["step"] == step:
            self.wait_for_saves(uploads=False)
        if self.writes and self.writer.wait(timeout=0):
            scheduled = [*self.folder.scheduled, step] if is_scheduled else self.folder.scheduled
            self.writer.save(header | {"scheduled": scheduled}, strategy.iter_full_state(), self.context.device)
        elif strategy.is_sharded:  # other ranks need the shards of this one
            for _ in strategy.iter_full_state():
                pass
        self.saved_at = time.monotonic()

    def poll(self, is_ending: bool) -> list[SaveResult]:
        """Returns the results of saves since the last call, and warns about errors.

        It does not warn if a folder is lost, since the trainer is about to end the run.

        Args:
            is_ending: whether the run is ending, so that the caller reports `last_error`

        Raises:
            Exception: a save has failed with an error that is not a UserError.
        """
        workers = [self.writer] if self.mirror is None else [self.writer, self.mirror]
        results = [worker.results.popleft() for worker in workers for _ in range(len(worker.results))]
        for result in results:
            error = result.error
            if result.is_scheduled:
                self.last_error = str(error or "")
            if error is None:
                continue
            if not isinstance(error, UserError):
                raise error
            if (result.is_scheduled or not self.has_warned) and not (is_ending or self.lock.lost_folder()):
                step = result.header["step"]
                logger.warning(f"step {step}: {error}; training continues, and the next save tries again")
                self.has_warned |= not result.is_scheduled
        return results

    def wait_for_saves(self, uploads: bool) -> None:
        """Waits until no rank is writing a snapshot, however long it takes.

        Args:
            uploads: whether to wait for the mirror as well
        """
        is_done = False
        while not is_done:
            is_idle = self.writer.wait(EXCHANGE_SECONDS)
            if self.mirror is not None and uploads:
                is_idle &= self.mirror.wait(EXCHANGE_SECONDS)
            is_done = reduce_object(self.context, is_idle, all)

    def close(self) -> None:
        """Ends the threads. It waits some seconds for a snapshot that is being written."""
        self.writer.close()
        if self.mirror is not None:
            self.mirror.close()
