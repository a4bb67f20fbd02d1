"""Pipeline parallelism: blocks are split into stages, and micro-batches pass through them one after another.

Ranks form a mesh of replicas x stages: rank r has stage r % stages of replica r // stages. Schedules and communication
are those of torch.distributed.pipelining (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., "PipeDream: Generalized
Pipeline Parallelism for DNN Training", 2019). The ranks with the same stage use any data-parallel strategy.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import record_function

from mingpt.config import Config, GPTConfig
from mingpt.distributed.position import POINT_TO_POINT
from mingpt.distributed.process_group import DistributedContext
from mingpt.loss import IGNORE_INDEX, cross_entropy
from mingpt.parallel.data_parallel import Strategy, WindowDataset
from mingpt.parallel.parallelize import GPTStage
from mingpt.utils.device import seed_device
from mingpt.utils.hashing import hash64
from mingpt.utils.tensors import to_local

WTE = "transformer.wte.weight"  # in the first stage and, where it is the output projection too, in the last


def pipeline_groups(
    context: DistributedContext, stages: int
) -> tuple[DistributedContext, DistributedContext, DistributedContext]:
    """The ranks with this rank's stage, those of its replica, and the first and last of its replica.

    torch's init_device_mesh makes the first two, but its groups have the default timeout, not ours.
    """
    rows = [range(start, start + stages) for start in range(0, context.world_size, stages)]
    ends = [[row[0], row[-1]] for row in rows] + [[rank] for row in rows for rank in row[1:-1]]
    return context.subgroup(zip(*rows, strict=True)), context.subgroup(rows, POINT_TO_POINT), context.subgroup(ends)


def stage_io(config: GPTConfig, B: int, stage: int, stages: int) -> tuple[Tensor, Tensor]:
    """Input and output of a stage, on the meta device."""
    with torch.device("meta"):
        hidden = torch.empty(B, config.block_size, config.n_embd, requires_grad=True)
        idx = torch.empty(B, config.block_size, dtype=torch.long)
        logits = torch.empty(B, config.block_size, config.vocab_size)
    return (hidden if stage else idx), (hidden if stage < stages - 1 else logits)


class PipelineParallel(Strategy):
    """Each rank holds one stage, in full or sharded over the replicas, and exchanges activations with its neighbors.

    Args:
        inner: the strategy of the ranks with this stage
        context: all ranks
        replica: the ranks of this replica, in the order of their stages
        embedding_group: the first and the last of them
        meta_stages: all stages, on the meta device
    """

    is_sharded = True

    def __init__(
        self,
        inner: Strategy,
        context: DistributedContext,
        replica: DistributedContext,
        embedding_group: DistributedContext,
        config: Config,
        meta_stages: list[GPTStage],
    ) -> None:
        self.inner, self.context, self.replica, self.embedding_group = inner, context, replica, embedding_group
        self.config, self.device, self.dtype, self.scaler = config, inner.device, inner.dtype, inner.scaler
        self.parameters, self.optimizer, self.local_optimizer = inner.parameters, inner.optimizer, inner.local_optimizer
        self.full_model = PipelinedModel(inner.full_model, replica)
        self.names = [[name for name, _ in stage.named_parameters()] for stage in meta_stages]
        self.ties_weights = WTE in self.names[-1]
        if self.ties_weights:
            self.names[-1].remove(WTE)  # it belongs to the first stage
        self.full_shapes = {name: weight for stage in meta_stages for name, weight in stage.named_parameters()}

        self.size: int = config.trainer.micro_batch_size  # type: ignore[assignment]  # config.py requires a number
        self.count = config.trainer.batch_size // inner.context.world_size // self.size
        self.stage = _Stage(inner, self, stage_io(meta_stages[0].config, self.size, replica.rank, replica.world_size))
        schedule, bubble = config.distributed.pipeline_schedule, replica.world_size - 1
        self.schedule: Any = get_schedule_class(schedule)(self.stage, self.count, self._loss, scale_grads=False)
        context.exit_callbacks.append(self._release)
        self.description = {
            "pipeline": f"replicas x stages: {inner.context.world_size} x {replica.world_size}, {schedule}, "
            f"{self.count} micro-batches of {self.size}: each stage waits {bubble / (self.count + bubble):.0%} of the "
            "time"
        }

    def _release(self) -> None:
        del self.schedule, self.stage  # they refer to what the inner strategy has released

    def forward_backward(self, batch: range, data: WindowDataset) -> list[Tensor]:
        """Runs the schedule on this replica's share. A short batch is filled up with samples without targets."""
        share = self.size * self.count
        first = batch.start + self.inner.context.rank * share
        numbers = range(first, first + share)
        idx, targets = data[numbers]
        is_filler = torch.arange(share) >= batch.stop - first
        targets = targets.masked_fill(is_filler[:, None], IGNORE_INDEX)
        self.stage.first_samples = numbers[:: self.size]
        self.loss_factor = self.inner.loss_factor / (len(batch) * targets.size(1))
        self.scaler.scale(torch.zeros((), device=self.device))  # `unscale_` needs it where no loss is scaled
        sums = self._run(self.schedule.step, idx, targets)
        if self.ties_weights and WTE in self.parameters:
            self.embedding_group.all_reduce(to_local(self.parameters[WTE].grad))  # type: ignore[arg-type]
        if self.scaler.is_enabled():
            overflow = 0 * self.grad_norm(self.parameters)  # NaN on all ranks if on one, so that all skip the step
            for parameter in self.parameters.values():
                to_local(parameter.grad).add_(overflow)  # type: ignore[arg-type]
        return [loss / (len(batch) * targets.size(1)) for loss in sums or [torch.zeros((), device=self.device)]]

    def _run(self, run: Any, idx: Tensor, targets: Tensor) -> list[Tensor]:
        """Passes a replica's share through the schedule; returns the loss of each micro-batch in the last stage."""
        self.loss_sums: list[Tensor] = []
        inputs = self.to_device(idx) if self.stage.is_first else ()
        [target] = self.to_device(targets) if self.stage.is_last else [None]
        run(*inputs, target=target, return_outputs=False)
        return self.loss_sums

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with record_function(f"loss {len(self.loss_sums)}"), self.autocast():
            loss = cross_entropy(logits, targets, "sum")
        self.loss_sums.append(loss.detach())
        return self.scaler.scale(loss * self.loss_factor)

    @property
    def batches_per_round(self) -> int:
        """Each replica takes as many batches at a time as a step has micro-batches."""
        return self.count * self.inner.context.world_size

    @torch.no_grad()
    def evaluate_round(self, batches: list[range], data: WindowDataset) -> Tensor:
        losses = torch.zeros(len(batches), device=self.context.device)
        first = self.count * self.inner.context.rank
        mine = batches[first : first + self.count]
        idx = torch.zeros(self.count, self.size, data.block_size, dtype=torch.long)
        targets = torch.full_like(idx, IGNORE_INDEX)
        for i, batch in enumerate(mine):
            idx[i, : len(batch)], targets[i, : len(batch)] = data[batch]
        self.full_model.eval()
        sums = self._run(self.schedule.eval, idx.flatten(0, 1), targets.flatten(0, 1))
        self.full_model.train()
        for i, (total, target) in enumerate(zip(sums[: len(mine)], targets, strict=False)):
            losses[first + i] = total / int((target != IGNORE_INDEX).sum())
        return losses

    def grad_norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Over all stages; wte, which two stages may have, counts once."""
        mine = {name: parameters[name] for name in self.names[self.replica.rank]}
        return self.replica.all_reduce(self.inner.grad_norm(mine) ** 2).sqrt()

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """The ranks of the first replica broadcast their stages, one after another."""
        local = {name: self.local_optimizer.state.get(parameter) for name, parameter in self.parameters.items()}
        meta = {
            name: {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in state.items()}
            for name, state in local.items()
            if state
        }
        metas = {name: likes for part in self.context.all_gather_object(meta) for name, likes in part.items()}
        for stage, names in enumerate(self.names):
            elsewhere: Iterator[Any] = ((name, None, {}) for name in names)
            for name, weight, tensors in self.inner.iter_full_state() if stage == self.replica.rank else elsewhere:
                if name in names:
                    full, likes = self._broadcast_from(stage, weight, self.full_shapes[name]), metas.get(name, {})
                    state = {key: self._broadcast_from(stage, tensors.get(key), like) for key, like in likes.items()}
                    yield name, full, state

    def load_tensor(self, name: str, key: str, full: Tensor) -> None:
        if name in self.parameters:
            self.inner.load_tensor(name, key, full)

    def dropout_seed(self, first: int) -> int:
        return int(hash64(self.config.trainer.seed, first, self.replica.rank)[0])


class PipelinedModel(nn.Module):
    """All stages as one model, which all ranks of a replica call together.

    Args:
        stage_model: the stage of this rank
        replica: the ranks, in the order of their stages
    """

    def __init__(self, stage_model: Any, replica: DistributedContext) -> None:
        super().__init__()
        self.stage_model, self.replica, self.config = stage_model, replica, stage_model.config
        self.new_kv_caches = stage_model.new_kv_caches

    def forward(self, idx: Tensor, targets: None = None, caches: list[Any] | None = None) -> tuple[Tensor, None]:
        """(B, T) characters -> logits (B, T, V), on each rank"""
        x, last = idx, self.replica.world_size - 1
        for stage in range(self.replica.world_size):
            if stage == self.replica.rank:
                x = self.stage_model(x, caches).float()
            else:
                width = self.config.vocab_size if stage == last else self.config.n_embd
                x = torch.empty(*idx.shape, width, device=idx.device)
            self.replica.broadcast_tensor(x, stage)
        return x, None


class _Stage(PipelineStage):
    """A stage that seeds and autocasts each forward pass like other strategies, with names for the profiler."""

    def __init__(self, inner: Strategy, pipeline: PipelineParallel, io: tuple[Tensor, Tensor]) -> None:
        replica = pipeline.replica
        super().__init__(inner.model, replica.rank, replica.world_size, inner.context.device, *io, group=replica.group)
        self.autocast, self.dropout_seed = inner.autocast, pipeline.dropout_seed
        self.first_samples = range(0)  # the first sample of each micro-batch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.has_backward:
            seed_device(self.device, self.dropout_seed(self.first_samples[fwd_chunk_id]))
        with _original_errors(), record_function(f"forward {fwd_chunk_id}"), self.autocast():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with _original_errors(), record_function(f"backward {bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


@contextmanager
def _original_errors() -> Iterator[None]:
    """Raises the cause of the library's RuntimeErrors, since callers handle out-of-memory errors."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None
