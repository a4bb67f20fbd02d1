"""Trains a few steps on a pretended GPU: the operations of one rank, on FakeTensors and a fake process group."""

import io
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorConverter,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import InferenceMode
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.nn.utils import get_total_norm
from torch.testing._internal.distributed.fake_pg import FakeStore

from mingpt.config.parser import read_config
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import RankInfo
from mingpt.parallel import strategy as strategies
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.storage import SnapshotStorage
from tests.gpu.host_waits import HostWaits
from trainer import Trainer

STEPS = 2  # that are watched


class _FakeMode(FakeTensorMode):
    avoid_device_init = True  # so that torch.tensor(..., device="cuda") is dispatched as the copy it is


class _LastStepError(Exception):
    pass


def dry_run(rank: int, world_size: int, argv: list[str], fault: str | None = None) -> dict[str, int]:
    """What `HostWaits` finds in steps, with all that the loop does between log lines, in evaluation and in saving.

    Args:
        argv: options of the run
        fault: a mistake to make, of `FAULTS`
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for patch in [*_patches(), *([FAULTS[fault]()] if fault else [])]:
            stack.enter_context(patch)
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(_FakeMode(allow_non_fake_inputs=True))
        watch = stack.enter_context(HostWaits())
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.callback(torch.use_deterministic_algorithms, False)
        text = Path(folder, "text.txt")
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 400, encoding="utf-8")
        config = read_config([f"--data.path={text}", f"--trainer.run_dir={folder}/run", *argv])
        # A host for each rank: then all devices are cuda:0.
        context = DistributedContext(RankInfo(rank, world_size, 0, 1), replace(config.distributed, backend="nccl"))
        trainer = Trainer(config, context)
        with suppress(DynamicOutputShapeException):  # which is among what was found
            _train(trainer, watch)
            trainer.strategy.evaluate_round([range(0, 2)], trainer.val_data)
            watch.recording = False
            if world_size == 1:  # with several ranks, the writer is the same
                _save(trainer, watch)
        for callback in context.exit_callbacks:
            callback()
        context.exit_callbacks.clear()
        return dict(watch.found)


def _train(trainer: Trainer, watch: HostWaits) -> None:
    def after_step() -> None:
        watch.recording = True  # after the first step, which allocates
        if trainer.progress.step == first + STEPS:
            raise _LastStepError

    trainer.first_step = trainer.progress.step = 1  # the first step of a run writes a row, and waits for it
    first = trainer.progress.step + 1
    with suppress(_LastStepError):
        while True:
            trainer.advance()
            after_step()


def _save(trainer: Trainer, watch: HostWaits) -> None:
    """Starts to save a snapshot, which may wait, and reads the weights like the thread that writes it."""

    def read(item: tuple[dict[str, Any], SnapshotStorage]) -> None:
        snapshot, _ = item
        watch.recording = True
        get_total_norm(list(snapshot["model"].values()))

    with mock.patch.object(trainer.snapshots.writer, "queue", SimpleNamespace(put=read)):
        trainer.save_snapshot()


def _patches() -> list[Any]:
    """Replacements of what needs other ranks, or values."""
    from_group = DeviceMesh.from_group

    def exchange(self: DistributedContext, value: Any, answer: Callable[[list[Any]], list[Any]]) -> Any:
        return answer([value] * self.world_size)[0]

    def real_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return from_group(*args, **kwargs)

    def warm_up(self: Any, stages: list[Any], *args: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def ddp(*args: Any, **kwargs: Any) -> DistributedDataParallel:
        model = DistributedDataParallel(*args, **kwargs)
        model.register_comm_hook(None, _bucket_as_it_is)  # the fake process group's all-reduce has no result
        return model

    return [
        mock.patch.object(DistributedContext, "_exchange", exchange),
        mock.patch.object(DistributedContext, "without_timeout", nullcontext),
        mock.patch.object(DistributedContext, "broadcast_object", lambda self, value, source=0: value),
        mock.patch.object(DeviceMesh, "from_group", real_mesh),
        # Its weak references keep Module.to_empty from replacing parameters.
        mock.patch.object(FakeTensorConverter, "set_tensor_memo"),
        mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", warm_up),
        mock.patch.object(strategies, "DistributedDataParallel", ddp),
        mock.patch.object(dist.Logger, "set_runtime_stats_and_log"),
        mock.patch.object(dist.Reducer, "_rebuild_buckets", return_value=False),
        mock.patch.object(distributed, "_verify_param_shape_across_processes"),
        mock.patch.object(distributed, "_sync_module_states"),
    ]


def _bucket_as_it_is(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _after_each_step(read: Callable[[Tensor], Any]) -> Any:
    """Makes the trainer read the norm of the gradient in each step."""
    clip_grad_norm_ = Strategy.clip_grad_norm_

    def clip_and_read(self: Strategy, max_norm: float | None) -> Tensor:
        norm = clip_grad_norm_(self, max_norm)
        read(norm)
        return norm

    return mock.patch.object(Strategy, "clip_grad_norm_", clip_and_read)


def _copies(copy: Callable[[Tensor, torch.device], Tensor]) -> Any:
    """Makes strategies copy batches in another way."""

    def to_device(self: Strategy, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(copy(tensor, self.context.device) for tensor in tensors)

    return mock.patch.object(Strategy, "to_device", to_device)


FAULTS: dict[str, Callable[[], Any]] = {
    "snapshot": lambda: mock.patch.object(torch.accelerator, "synchronize"),
    "strided": lambda: _copies(lambda tensor, device: tensor.pin_memory().to(device, non_blocking=True)),
    "pageable": lambda: _copies(lambda tensor, device: tensor.contiguous().to(device, non_blocking=True)),
    "blocking": lambda: _copies(lambda tensor, device: tensor.contiguous().pin_memory().to(device)),
    "item": lambda: _after_each_step(lambda norm: norm.item()),
    "tensor": lambda: _after_each_step(lambda norm: norm + torch.tensor([1.0], device=norm.device)),
    "nonzero": lambda: _after_each_step(lambda norm: norm.nonzero()),
    "mask": lambda: _after_each_step(lambda norm: norm[None][norm[None] > 0]),
    "synchronize": lambda: _after_each_step(lambda norm: torch.cuda.synchronize()),
    "event": lambda: _after_each_step(lambda norm: torch.cuda.current_stream().record_event().synchronize()),
    "read": lambda: _after_each_step(lambda norm: norm.cpu()),
    "race": lambda: _after_each_step(lambda norm: norm.to("cpu", non_blocking=True) + 1),
}
