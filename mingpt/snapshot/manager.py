"""Saves snapshots: which ranks write them, when, and where to; finds the snapshot to resume from."""

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from mingpt.config.schema import Config
from mingpt.distributed.agreement import all_gather_object, broadcast_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import RunLog, saved_steps
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.folder import SnapshotFolder, open_folders, snapshot_name
from mingpt.snapshot.format import Best, split_header
from mingpt.snapshot.load import new_run_advice, weight_differences
from mingpt.snapshot.mirror import check_owner, sync
from mingpt.system.run_lock import RunLock, read_holder
from mingpt.system.signals import SignalHandler

MIN_SECONDS = 1.0  # minimum time between two snapshots, even if saving is cheap
EXCHANGE_SECONDS = 0.5  # interval between exchanges of ranks that wait for saves, below distributed.timeout_seconds
REPORT_SECONDS = 5.0  # how long ranks wait for a save before rank 0 says so, and then every minute
EXIT_WAIT_SECONDS = 5.0  # how long a run that fails waits for a snapshot that is being written


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


@dataclass(frozen=True, eq=False)
class Save:
    """A snapshot that a thread writes or uploads.

    Attributes:
        header: the snapshot without its tensors
        folder: the folder that it is written to, or the mirror
        future: ends with the write or the upload; its exception is why that has failed
    """

    header: dict[str, Any]
    folder: SnapshotFolder
    future: Future[Any]

    @property
    def is_scheduled(self) -> bool:
        """Whether trainer.save_every asked for the snapshot, or it ended the run."""
        return self.header["step"] in self.header["scheduled"]


class SnapshotManager:
    """The snapshots of a run. All ranks build it together.

    Rank 0 writes snapshots. On every machine that does not see rank 0's folder, the first rank also writes. If
    trainer.snapshot_path is a URL, rank 0 uploads the newest scheduled snapshot and the best one. One thread writes and
    another one uploads, which delays neither training nor local saves.

    Args:
        lock: lock of the folders. If it is lost, nothing is written or deleted.
        signals: may end a wait

    Raises:
        UserError: a rank can't write to its folder of snapshots.
    """

    def __init__(self, config: Config, context: DistributedContext, lock: RunLock, signals: SignalHandler) -> None:
        self.config = config
        self.context = context
        self.lock = lock
        self.signals = signals
        self.folder, remote = open_folders(config.trainer)
        lock_id = broadcast_object(context, lock.id)
        self.run_id = lock_id  # of the start that begins the run
        self.is_writer = context.rank == 0 or (
            context.local_rank == 0 and read_holder(self.folder.root).get("id") != lock_id
        )
        with shared_errors(context):
            for folder in (self.folder, remote):
                if folder is not None and self.is_writer:
                    folder.make()
        self.remote = remote if context.rank == 0 else None
        self.header: dict[str, Any] = {}  # of the newest snapshot
        self.newest_write: Future[Any] = Future()
        self.newest_write.set_result(None)
        self.newest_upload = self.newest_write
        self.saves: list[Save] = []  # until `log_ended` removes them
        self.staging_buffers: dict[Any, Tensor] = {}
        self.costs: deque[float] = deque(maxlen=16)  # seconds that each of the newest saves has taken from training
        self.overhead = config.trainer.save_overhead
        self.saved_at = time.monotonic()

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
        remote = [] if self.remote is None else [self.remote]
        with shared_errors(context):
            for folder in [self.folder, *remote] if self.is_writer else []:
                before = content
                try:
                    newer = folder.load_newest(after=content.get("step", -1))
                except UserError as error:
                    failure = str(error)
                    continue
                if newer is not None:
                    content = newer
                    path = folder.file(content["step"])
                if folder is self.remote:
                    check_owner(folder, before, content, self.config.trainer.run_dir)
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
        if self.context.rank == 0 and (names := self.folder.other_files()):
            logger.warning(f"{self.folder.path}: not named like step_00000500.pt, and not used: {names}")
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
        if self.is_writer:
            self.folder.resume(header)
        self.header = header
        self.run_id = header["run_id"]
        self._upload()  # the last upload may have failed

    def is_save_due(self) -> bool:
        """Returns whether to save a snapshot after the next step. All ranks must call it; rank 0 decides.

        At most one a second, and fewer if saves would take more than `trainer.save_overhead` of the time.
        """
        if self.context.rank > 0 or self.overhead is None or not self.newest_write.done():
            return False
        cost = fmean(self.costs or [0.0])
        return time.monotonic() >= self.saved_at + max(MIN_SECONDS, cost / self.overhead)

    def save(self, header: dict[str, Any], strategy: Strategy, is_scheduled: bool) -> None:
        """Starts to write a snapshot.

        If the previous snapshot is still being written, one that is kept waits for it, and any other is skipped.

        Args:
            header: the snapshot without its tensors, `scheduled` and `best_saved`
            is_scheduled: whether trainer.save_every requires it, or the run ends with this step
        """
        step = header["step"]
        is_best = header["best"]["step"] == step
        if is_scheduled or is_best:
            self.wait(self.newest_write, self.folder.path)
        if self.is_writer and self.newest_write.done():
            scheduled = [*self.folder.scheduled, step] if is_scheduled else self.folder.scheduled
            best_saved = step if is_best else self.folder.best
            self.header = header | {"run_id": self.run_id, "scheduled": scheduled, "best_saved": best_saved}
            tensors, seconds = self._stage(strategy)
            self.newest_write = _start(self.newest_write, self._write, self.header | tensors, seconds)
            self.saves.append(Save(self.header, self.folder, self.newest_write))
            self.lock.writing = self.newest_write
        elif strategy.is_sharded:  # other ranks need the shards of this one
            for _ in strategy.iter_full_state():
                pass
        self.saved_at = time.monotonic()

    @torch.no_grad()
    def _stage(self, strategy: Strategy) -> tuple[dict[str, Any], float]:
        """Copies weights and optimizer state to buffers, which the next save reuses. Returns also its seconds."""
        _synchronize(self.context.device)  # otherwise, the time would include the step before it
        began = time.perf_counter()
        model = {}
        optimizer = {}
        for name, weight, moments in strategy.iter_full_state():
            model[name] = self._copy(name, weight)
            optimizer[name] = {key: self._copy(f"{name}/{key}", moment) for key, moment in moments.items()}
        _synchronize(self.context.device)
        return {"model": model, "optimizer": optimizer}, time.perf_counter() - began

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        key = (name, tensor.shape, tensor.dtype)  # a model may replace its buffers
        if key not in self.staging_buffers:
            self.staging_buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        # On other devices, non_blocking is unsafe without pinned memory
        # (https://github.com/pytorch/pytorch/issues/189690).
        return self.staging_buffers[key].copy_(tensor, non_blocking=tensor.is_cuda)

    def _write(self, snapshot: dict[str, Any], cost: float) -> None:
        """Writes a snapshot, in the thread. `cost` is the seconds for which training has waited."""
        began = time.thread_time()
        try:
            # Buffers and frozen parameters have no optimizer state. A buffer may be a mask of infinities, or integers.
            trained = [weight for name, weight in snapshot["model"].items() if snapshot["optimizer"].get(name)]
            if not get_total_norm(trained).isfinite():
                raise UserError("the step's update produced non-finite weights; lower optimizer.learning_rate")
            self.lock.check()
            self.folder.write(snapshot)
        finally:
            # On a CPU, steps take longer while the file is written, at most by the CPU time of this thread.
            on_cpu = self.context.device.type == "cpu"
            self.costs.append(cost + on_cpu * (time.thread_time() - began))
        if snapshot["step"] in (*snapshot["scheduled"], snapshot["best_saved"]):
            self._upload()

    def _upload(self) -> None:
        """Starts to upload what the mirror lacks, if there is a mirror."""
        has_begun = self.newest_upload.running() or self.newest_upload.done()  # otherwise, it will do
        if self.remote is not None and has_begun:
            self.newest_upload = _start(self.newest_upload, sync, self.folder, self.remote, self.run_id)
            self.saves.append(Save(self.header, self.remote, self.newest_upload))

    def log_ended(self, log: RunLog, is_last: bool) -> None:
        """Logs the saves that have ended since the last call, and the uploads that have failed.

        Args:
            is_last: whether the run ends, and reports errors itself

        Raises:
            Exception: one has failed with an error that is not a UserError.
        """
        for save in [save for save in self.saves if save.future.done()]:
            self.saves.remove(save)  # the other thread may append one at the same time
            step = save.header["step"]
            error = save.future.exception()
            if not isinstance(error, UserError | None):
                raise error
            if error is not None and not (is_last or self.lock.lost_folder()):
                subject = str(step) if save.is_scheduled else "saves between those of trainer.save_every"
                message = f"step {step}: {error}; training continues, and the next save tries again"
                self.folder.warn_once(subject, message)
            row = {"path": self.folder.file(step), "val_loss": save.header["val_loss"]}
            if error is not None:
                row = {"error": str(error)}
            if save.is_scheduled and (save.folder is self.folder or error is not None):
                log.write("snapshot", step, **row)

    def saved_best(self, best: Best) -> Best | None:
        """Returns the best evaluation if its snapshot is in the local folder, and not only in the mirror."""
        if best.step is None or best.step != self.folder.best:
            return None
        return best if os.path.exists(os.path.join(self.folder.root, snapshot_name(best.step))) else None

    def wait(self, future: Future[Any], place: str | None, ends_at_signal: bool = False) -> int:
        """Waits until a save has ended on all ranks, however long it takes.

        A second signal ends the process, or the wait in a session.

        Args:
            future: ends with the save
            place: the folder or the URL, for messages
            ends_at_signal: whether the first signal ends the wait

        Returns:
            the signal that has ended the wait; 0: the save has ended
        """
        report_at = time.monotonic() + REPORT_SECONDS
        self.signals.is_waiting = True
        while True:
            wait_for([future], EXCHANGE_SECONDS)
            signal = self.signals.signal if ends_at_signal or self.signals.is_urgent else 0
            has_ended, received = zip(*all_gather_object(self.context, (future.done(), signal)), strict=True)
            if all(has_ended) or any(received):
                break
            if time.monotonic() >= report_at:
                logger.info(f"waiting for rank {has_ended.index(False)} to save a snapshot in {place}")
                report_at += 60.0
        self.signals.is_waiting = False
        return 0 if all(has_ended) else max(received)

    def finish(self, is_complete: bool) -> int:
        """Waits until the newest snapshot is written and the mirror is complete, even if earlier saves have failed.

        Args:
            is_complete: whether all steps are complete, so that the first signal ends the wait for the mirror. If a
                signal has stopped the run before, a mirror that lacks a snapshot is no error

        Returns:
            the signal that has ended the wait for the mirror; 0: the upload has ended

        Raises:
            UserError: on all ranks, if a snapshot can't be written or uploaded, or a folder is lost.
        """
        self.wait(self.newest_write, self.folder.path)
        self._upload()
        signal = self.wait(self.newest_upload, self.config.trainer.snapshot_path, ends_at_signal=is_complete)
        step = self.header.get("step")  # only writers have a header
        with shared_errors(self.context):  # the last collective, where other ranks wait for a rank that hangs
            self.lock.check()
            if not self.newest_write.done():
                raise UserError(
                    f"interrupted before the snapshot of step {step} was written; run the same command to resume from "
                    "the one before"
                )
            if error := self.newest_write.exception():
                raise UserError(
                    f"training has reached step {step}, but its snapshot could not be saved: {error}. Fix this and run "
                    "the same command to resume from the newest snapshot"
                ) from error
            if self.newest_upload.done() and (error := self.newest_upload.exception()):
                message = (
                    f"the snapshot of step {step} is in {self.folder.path}, but not all snapshots could be uploaded: "
                    f"{error}. Run the same command to upload them"
                )
                if is_complete:
                    raise UserError(message) from error
                logger.warning(message)
        return signal

    def close(self) -> None:
        """Waits some seconds for a snapshot that is being written, and for no upload."""
        wait_for([self.newest_write], EXIT_WAIT_SECONDS)
        self.remote = None  # a write that ends later starts no upload
        self.newest_upload.cancel()  # has no effect if it has begun
        self.staging_buffers.clear()


def _start(previous: Future[Any], function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls a function in a thread, after a previous call has ended.

    At its exit, the interpreter would wait for the threads of a ThreadPoolExecutor, also for an upload that hangs.
    """
    future: Future[Any] = Future()

    def call() -> None:
        wait_for([previous])
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

    Thread(target=call, name="snapshot", daemon=True).start()
    return future


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # on the CPU, this would initialize a GPU that is not used
        torch.accelerator.synchronize(device)
