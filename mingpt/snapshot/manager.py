"""Saves snapshots: which ranks write them, when, and where to; finds the snapshot to resume from."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from mingpt.config.schema import Config
from mingpt.distributed.agreement import all_gather_object, broadcast_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.run_log import RunLog
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.folder import open_folders, sync
from mingpt.snapshot.format import Header, Snapshot, split_header
from mingpt.snapshot.load import NEW_RUN, weight_differences
from mingpt.system.run_lock import RunLock, read_holder

MIN_SECONDS = 1.0  # minimum time between two snapshots, even if saving is cheap
EXCHANGE_SECONDS = 0.5  # interval between exchanges of ranks that wait for saves, below distributed.timeout_seconds
EXIT_WAIT_SECONDS = 5.0  # how long a run that fails waits for a snapshot that is being written


class NewestSnapshot(NamedTuple):
    """The newest snapshot that any rank has.

    Attributes:
        header: the snapshot without its tensors, on all ranks
        content: the whole snapshot on the rank that has loaded it; empty on other ranks
        source_rank: the rank that has loaded it
        path: its file on that rank
    """

    header: Header
    content: Snapshot
    source_rank: int
    path: str


class Save(NamedTuple):
    """A snapshot that a thread writes or uploads; the exception of `future` is why that has failed."""

    header: Header
    is_flushed: bool  # if it fails, there is a warning; the others are too many
    is_scheduled: bool  # metrics.jsonl gets a row
    future: Future[None]


class SnapshotManager:
    """The snapshots of a run. All ranks build it together.

    Rank 0 writes snapshots. On every machine that does not see rank 0's folder, the first rank also writes. If
    trainer.snapshot_path is set, rank 0 also uploads the newest flushed snapshot and the best one. One thread writes
    and another one uploads, which delays neither training nor local saves.

    Args:
        lock: lock of the run folder, on rank 0. If it is lost, nothing is written or deleted.
    """

    def __init__(self, config: Config, context: DistributedContext, lock: RunLock | None) -> None:
        self.run_dir = Path(config.trainer.run_dir)
        self.context = context
        self.lock = lock
        self.folder, mirror = open_folders(config.trainer)
        self.mirror = mirror if context.rank == 0 else None
        lock_id = broadcast_object(context, lock.id if lock else None)
        self.is_writer = context.rank == 0 or (
            context.local_rank == 0 and read_holder(self.run_dir).get("id") != lock_id
        )
        self.header: Header = {}  # of the newest snapshot that is flushed to disk
        self.writer = ThreadPoolExecutor(1, "snapshot")
        self.uploader = ThreadPoolExecutor(1, "snapshot")
        self.newest_write: Future[None] = Future()
        self.newest_write.set_result(None)
        self.newest_upload = self.newest_write
        self.saves: list[Save] = []  # until `log_ended` removes them
        self.overhead = config.trainer.save_overhead
        self.cost = 0.0  # seconds that the newest save has taken from training
        self.saved_at = time.monotonic()

    def load_newest(self) -> NewestSnapshot | None:
        """Loads the newest snapshot that any rank has. Returns None if there are no snapshots.

        Raises:
            UserError: a rank can't write to its folder of snapshots, or there is none that can be read.
        """
        content: Snapshot = {}
        path = ""
        folders = [folder for folder in (self.folder, self.mirror) if folder is not None and self.is_writer]
        with shared_errors(self.context):
            for folder in folders:
                try:
                    folder.make()
                    newer = folder.load_newest(after=content.get("step", -1))
                except UserError as error:
                    if not content:
                        raise
                    logger.warning(str(error))  # a store that is away does not stop a run that has its own snapshots
                    continue
                if newer:
                    content = newer
                    path = folder.file(content["step"])
        steps = all_gather_object(self.context, content.get("step", -1))
        if max(steps) < 0:
            return None
        source_rank = steps.index(max(steps))
        header, path = broadcast_object(self.context, (split_header(content), path), source_rank)
        if self.context.rank != source_rank:
            content = {}
        return NewestSnapshot(header, content, source_rank, path)

    def restore(self, newest: NewestSnapshot, strategy: Strategy) -> None:
        """Loads the tensors of the newest snapshot."""
        content = newest.content
        header = newest.header
        with shared_errors(self.context):
            if content and (differences := weight_differences(content["model"], strategy.full_shapes)):
                raise UserError(
                    f"the weights in {newest.path} are not those of the model, whose code has changed: {differences}. "
                    f"To train it, {NEW_RUN}; with trainer.init_from {self.run_dir}, it begins with the weights that "
                    "fit"
                )
        strategy.load_full_state(content.get("model", {}), content.get("optimizer", {}), newest.source_rank)
        if header["scaler"]:  # it is empty unless the run that saved it used fp16
            strategy.scaler.load_state_dict(header["scaler"])
        strategy.load_changed_groups(header["param_groups"])

        self.header = header
        self._upload()  # the last upload may have failed

    def is_save_due(self) -> bool:
        """Returns whether to save a snapshot after the next step. All ranks must call it; rank 0 decides.

        At most one a second, and fewer if saves would take more than `trainer.save_overhead` of the time.
        """
        if self.context.rank > 0 or self.overhead is None or not self.newest_write.done():
            return False
        return time.monotonic() >= self.saved_at + max(MIN_SECONDS, self.cost / self.overhead)

    def save(self, header: Header, strategy: Strategy, is_scheduled: bool) -> None:
        """Starts to write a snapshot.

        If the previous snapshot is still being written, one that is flushed waits for it, and any other is skipped.

        Args:
            header: the snapshot without its tensors
            is_scheduled: whether trainer.save_every requires it, or the run ends with this step
        """
        is_flushed = is_scheduled or header["best"]["step"] == header["step"]
        if is_flushed:
            self.wait(self.newest_write)
        writes = self.is_writer and self.newest_write.done()
        _synchronize(self.context.device)  # otherwise, the time would include the step before it
        began = time.perf_counter()
        model = {}
        optimizer = {}
        for name, weight, moments in strategy.iter_full_state():  # other ranks need the shards of this one
            if writes:
                model[name] = _copy(weight)
                optimizer[name] = {key: _copy(moment) for key, moment in moments.items()}
        _synchronize(self.context.device)
        if writes:
            snapshot = header | {"model": model, "optimizer": optimizer}
            cost = time.perf_counter() - began
            self.newest_write = self.writer.submit(self._write, snapshot, is_flushed, cost)
            self.saves.append(Save(header, is_flushed, is_scheduled, self.newest_write))
        self.saved_at = time.monotonic()

    def _write(self, snapshot: Snapshot, is_flushed: bool, cost: float) -> None:
        """Writes a snapshot, in the thread. `cost` is the seconds for which training has waited."""
        began = time.thread_time()
        try:
            # Buffers and frozen parameters have no optimizer state. A buffer may be a mask of infinities, or integers.
            trained = [weight for name, weight in snapshot["model"].items() if snapshot["optimizer"][name]]
            if not get_total_norm(trained).isfinite():
                raise UserError("the step's update produced non-finite weights; lower optimizer.learning_rate")
            if self.lock is not None:
                self.lock.check()
            self.folder.write(snapshot, is_flushed)
        finally:
            # On a CPU, steps take longer while the file is written, at most by the CPU time of this thread.
            self.cost = cost + time.thread_time() - began
        if is_flushed:
            self.header = split_header(snapshot)
            self._upload()

    def _upload(self) -> None:
        """Starts to upload what the mirror lacks, if there is a mirror."""
        # One that has not begun will do.
        if self.mirror and self.header and (self.newest_upload.running() or self.newest_upload.done()):
            self.newest_upload = self.uploader.submit(self._sync)
            self.saves.append(Save(self.header, True, False, self.newest_upload))

    def _sync(self) -> None:
        if self.mirror is not None:
            sync(self.folder, self.mirror, self.header["step"], self.header["best"]["step"])

    def log_ended(self, log: RunLog, is_last: bool) -> None:
        """Logs the saves that have ended since the last call, and warns of flushed ones that have failed.

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
            if error is not None and not is_last and save.is_flushed:
                logger.warning(f"step {step}: {error}; training continues, and the next save tries again")
            if save.is_scheduled:
                row = {"path": self.folder.file(step), "val_loss": save.header["val_loss"]}
                log.write("snapshot", step, **({"error": str(error)} if error else row))

    def wait(self, future: Future[None]) -> None:
        """Waits until a save has ended on all ranks, however long it takes."""
        has_ended = [False]
        while not all(has_ended):
            wait_for([future], EXCHANGE_SECONDS)
            has_ended = all_gather_object(self.context, future.done())

    def finish(self, is_complete: bool) -> None:
        """Waits until the newest snapshot is written and the mirror is complete, even if earlier saves have failed.

        Args:
            is_complete: whether all steps are complete. If a signal has stopped the run before, a mirror that lacks a
                snapshot is no error

        Raises:
            UserError: on all ranks, if a snapshot can't be written or uploaded, or the folder is lost.
        """
        self.wait(self.newest_write)
        self._upload()
        if self.mirror is not None and not self.newest_upload.done():
            logger.info(f"waiting for the upload of snapshots to {self.mirror.path}")
        self.wait(self.newest_upload)
        with shared_errors(self.context):  # the last collective, where other ranks wait for a rank that hangs
            if self.lock is not None:
                self.lock.check()
            if error := self.newest_write.exception() or self.newest_upload.exception():
                message = f"not all snapshots could be saved: {error}. Fix this and run the same command"
                if is_complete or self.newest_write.exception():
                    raise UserError(message) from error
                logger.warning(message)

    def close(self) -> None:
        """Waits some seconds for a snapshot that is being written, and for no upload."""
        wait_for([self.newest_write], EXIT_WAIT_SECONDS)
        self.mirror = None  # a write that ends later starts no upload
        self.writer.shutdown(wait=False)
        self.uploader.shutdown(wait=False, cancel_futures=True)


def _copy(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU, from CUDA to pinned memory, which PyTorch reuses for the next save."""
    # On other devices, non_blocking is unsafe without pinned memory
    # (https://github.com/pytorch/pytorch/issues/189690).
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda, copy=True)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # on the CPU, this would initialize a GPU that is not used
        torch.accelerator.synchronize(device)
