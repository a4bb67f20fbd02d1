"""Pipeline parallelism: blocks are split into stages, and micro-batches pass through them one after another.

Ranks form a mesh of replicas x stages: rank r has stage r % stages of replica r // stages. Schedules and communication
are those of torch.distributed.pipelining (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., "PipeDream: Generalized
Pipeline Parallelism for DNN Training", 2019). The ranks with the same stage use any data-parallel strategy.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import record_function

from mingpt.config import Config
from mingpt.distributed.collectives import DistributedContext
from mingpt.distributed.position import POINT_TO_POINT
from mingpt.errors import UserError
from mingpt.hardware.device import seed_device
from mingpt.kernels import IGNORE_INDEX, cross_entropy
from mingpt.parallel.full_state import StateShapes, state_shapes
from mingpt.parallel.strategy import MicroBatch, Strategy, WindowDataset
from mingpt.permutation import hash64
from mingpt.tensors import to_local

WTE = "transformer.wte.weight"  # in the first stage and, where it is the output projection too, in the last


class GPTStage(nn.Module):
    """Consecutive blocks of a GPT, with the embeddings in the first stage and the output projection in the last.

    Blocks are distributed evenly. Modules are those of the GPT, and parameters have the same names.
    """

    def __init__(self, gpt: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.config = gpt.config
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        first_block = len(gpt.blocks) * stage // stages
        end_block = len(gpt.blocks) * (stage + 1) // stages
        blocks = {str(i): gpt.blocks[i] for i in range(first_block, end_block)}
        has_head = hasattr(gpt, "lm_head")  # otherwise wte is the output projection too
        modules: dict[str, nn.Module] = {}
        if self.is_first or (self.is_last and not has_head):
            modules["wte"] = gpt.transformer["wte"]
        if self.is_first and "wpe" in gpt.transformer:
            modules["wpe"] = gpt.transformer["wpe"]
        if self.is_first:
            modules["drop"] = gpt.transformer["drop"]
        modules["h"] = nn.ModuleDict(blocks)
        if self.is_last:
            modules["ln_f"] = gpt.transformer["ln_f"]
        self.transformer = nn.ModuleDict(modules)
        if self.is_last and has_head:
            self.lm_head = gpt.lm_head
        self.embed = gpt.embed
        self.rotary_factors = gpt.rotary_factors
        self.unembed = gpt.unembed
        self.new_kv_caches = gpt.new_kv_caches

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.transformer["h"].children())

    def forward(self, x: Tensor, caches: list[Any] | None = None) -> Tensor:
        """(B, T) characters in the first stage, else (B, T, C) -> logits (B, T, V) in the last stage, else (B, T, C)"""
        start = caches[0].length if caches else 0
        if self.is_first:
            x = self.embed(x, start)
        rotary = self.rotary_factors(x, caches[0] if caches else None)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, caches[i] if caches else None)
        return self.unembed(x) if self.is_last else x


def split_into_stages(gpt: nn.Module, stages: int) -> list[GPTStage]:
    """The pipeline stages of a GPT."""
    return [GPTStage(gpt, stage, stages) for stage in range(stages)]


def stage_input(stage: GPTStage, batch_size: int) -> Tensor:
    """What a stage receives, on the meta device: characters (B, T), or (B, T, C) from the stage before."""
    T = stage.config.block_size
    if stage.is_first:
        return torch.empty(batch_size, T, dtype=torch.long, device="meta")
    return torch.empty(batch_size, T, stage.config.n_embd, requires_grad=True, device="meta")


def stage_output(stage: GPTStage, batch_size: int) -> Tensor:
    """What a stage returns, on the meta device: logits (B, T, V) in the last one, else (B, T, C)."""
    T = stage.config.block_size
    if stage.is_last:
        return torch.empty(batch_size, T, stage.config.vocab_size, device="meta")
    return torch.empty(batch_size, T, stage.config.n_embd, requires_grad=True, device="meta")


class PipelineGroups(NamedTuple):
    """The groups of ranks that a rank belongs to."""

    data_parallel: DistributedContext  # the ranks with the same stage, one in each replica of the model
    pipeline: DistributedContext  # the ranks of one replica, in the order of their stages
    tied_embedding: DistributedContext  # the first and the last rank of a replica, or this rank alone


def pipeline_groups(context: DistributedContext, stages: int) -> PipelineGroups:
    """Makes the groups; all ranks together.

    torch's init_device_mesh makes the first two, but its groups have the default timeout, not ours.
    """
    rows = [range(start, start + stages) for start in range(0, context.world_size, stages)]
    columns = list(zip(*rows, strict=True))
    ends = [[row[0], row[-1]] for row in rows]
    middles = [[rank] for row in rows for rank in row[1:-1]]
    return PipelineGroups(
        context.subgroup(columns), context.subgroup(rows, POINT_TO_POINT), context.subgroup(ends + middles)
    )


class PipelineParallel(Strategy):
    """Each rank holds one stage, in full or sharded over the replicas, and exchanges activations with its neighbors.

    Args:
        inner: the strategy of the ranks with this stage
        context: all ranks
        stage_shapes: for each stage, its parameters by name, with their full shapes
    """

    is_sharded = True

    def __init__(
        self,
        inner: Strategy,
        context: DistributedContext,
        groups: PipelineGroups,
        config: Config,
        stage: GPTStage,
        stage_shapes: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.inner = inner
        self.context = context
        self.pipeline = groups.pipeline
        self.tied_embedding = groups.tied_embedding
        self.config = config
        self.device = inner.device
        self.dtype = inner.dtype
        self.scaler = inner.scaler
        self.parameters = inner.parameters
        self.optimizer = inner.optimizer
        self.full_model = PipelinedModel(inner.full_model, self.pipeline)
        self.full_shapes: dict[str, Tensor] = {}
        for shapes in stage_shapes:
            self.full_shapes |= shapes
        self.names = [list(shapes) for shapes in stage_shapes]
        self.ties_weights = WTE in self.names[-1]
        if self.ties_weights:
            self.names[-1].remove(WTE)  # it belongs to the first stage

        self.size: int = config.trainer.micro_batch_size  # type: ignore[assignment]  # config.py requires a number
        self.count = config.trainer.batch_size // inner.context.world_size // self.size  # per replica
        self.stage = _Stage(inner, self, stage_input(stage, self.size), stage_output(stage, self.size))
        schedule = config.distributed.pipeline_schedule
        self.schedule: Any = get_schedule_class(schedule)(self.stage, self.count, self._loss, scale_grads=False)
        self.loss_sums: list[Tensor] = []  # of each micro-batch that the last stage has finished
        context.exit_callbacks.append(self._release)
        waits = self.pipeline.world_size - 1
        self.description = {
            "pipeline": f"replicas x stages: {inner.context.world_size} x {self.pipeline.world_size}, {schedule}, "
            f"{self.count} micro-batches of {self.size}: each stage waits {waits / (self.count + waits):.0%} of the "
            "time"
        }

    @classmethod
    def validate(cls, config: Config, world_size: int) -> None:
        stages = config.distributed.pipeline_stages
        batch_size = config.trainer.batch_size
        size = config.trainer.micro_batch_size or batch_size
        if world_size % stages:
            raise UserError(
                f"distributed.pipeline_stages is {stages}, of which {world_size} processes are no multiple: start "
                f"{-(-world_size // stages) * stages} processes, or set it to 1"
            )
        replicas = world_size // stages
        if batch_size % (replicas * size):
            raise UserError(
                f"trainer.batch_size is {batch_size}, must be a multiple of {replicas * size} with "
                f"distributed.pipeline_stages {stages}: {replicas} replicas x trainer.micro_batch_size {size}, as all "
                "micro-batches of a pipeline have one size"
            )
        micro_batches = batch_size // replicas // size
        if micro_batches < stages and config.distributed.pipeline_schedule == "1f1b":
            raise UserError(
                f"trainer.batch_size / replicas / trainer.micro_batch_size is {batch_size} / {replicas} / {size}, "
                f"{micro_batches} micro-batches for {stages} stages, which would wait "
                f"{(stages - 1) / (micro_batches + stages - 1):.0%} of the time: lower trainer.micro_batch_size, or "
                "set distributed.pipeline_schedule to gpipe, which accepts it"
            )

    def _release(self) -> None:
        # They refer to what the inner strategy has released.
        del self.schedule
        del self.stage

    def micro_batches(self, batch: range) -> list[MicroBatch]:
        """This replica's share as one, which the schedule divides. It may go beyond the end of a short batch."""
        share = self.size * self.count
        first = batch.start + self.inner.context.rank * share
        return [MicroBatch(range(first, first + share), share / len(batch), batch, sync_gradients=True)]

    def forward_backward(self, micro_batch: MicroBatch, data: WindowDataset) -> list[Tensor]:
        """Runs the schedule. A short batch is filled up with samples without targets."""
        indices = micro_batch.indices
        idx, targets = data[indices]
        is_filler = torch.tensor([number >= micro_batch.batch.stop for number in indices])
        targets = targets.masked_fill(is_filler[:, None], IGNORE_INDEX)
        num_targets = len(micro_batch.batch) * targets.size(1)
        self.stage.first_samples = indices[:: self.size]
        self.gradient_divide_factor = self.inner.gradient_divide_factor / num_targets
        self.scaler.scale(torch.zeros((), device=self.device))  # `unscale_` needs it where no loss is scaled
        self.loss_sums = []
        self.schedule.step(*self._stage_inputs(idx), target=self._stage_targets(targets), return_outputs=False)
        losses = [loss / num_targets for loss in self.loss_sums]
        return losses or [torch.zeros((), device=self.device)]

    def _stage_inputs(self, idx: Tensor) -> tuple[Tensor, ...]:
        return self.to_device(idx) if self.stage.is_first else ()

    def _stage_targets(self, targets: Tensor) -> Tensor | None:
        return self.to_device(targets)[0] if self.stage.is_last else None

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Called by the schedule in the last stage, for each micro-batch."""
        with record_function(f"loss {len(self.loss_sums)}"), self.autocast():
            loss = cross_entropy(logits, targets, "sum")
        self.loss_sums.append(loss.detach())
        return self.scaler.scale(loss * self.gradient_divide_factor)

    def reduce_gradients(self, batch: range, losses: list[Tensor]) -> list[Tensor]:
        """Adds up the gradients of wte, which two stages may have."""
        if self.ties_weights and WTE in self.parameters:
            self.tied_embedding.all_reduce(to_local(self.parameters[WTE].grad))  # type: ignore[arg-type]
        if self.scaler.is_enabled():
            overflow = 0 * self.grad_norm(self.parameters)  # NaN on all ranks if on one, so that all skip the step
            for parameter in self.parameters.values():
                to_local(parameter.grad).add_(overflow)  # type: ignore[arg-type]
        return losses

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
            idx[i], targets[i] = data[batch]
        self.loss_sums = []
        self.full_model.eval()
        self.schedule.eval(
            *self._stage_inputs(idx.flatten(0, 1)),
            target=self._stage_targets(targets.flatten(0, 1)),
            return_outputs=False,
        )
        self.full_model.train()
        for i, (total, target) in enumerate(zip(self.loss_sums[: len(mine)], targets, strict=False)):
            losses[first + i] = total / int((target != IGNORE_INDEX).sum())
        return losses

    def grad_norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Over all stages; wte, which two stages may have, counts once."""
        mine = {name: parameters[name] for name in self.names[self.pipeline.rank]}
        return self.pipeline.all_reduce(self.inner.grad_norm(mine) ** 2).sqrt()

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """The ranks of the first replica broadcast their stages, one after another."""
        shapes: StateShapes = {}
        for part in self.context.all_gather_object(state_shapes(self.local_state())):
            shapes |= part
        for stage, names in enumerate(self.names):
            elsewhere: Iterator[Any] = ((name, None, {}) for name in names)
            for name, weight, tensors in self.inner.iter_full_state() if stage == self.pipeline.rank else elsewhere:
                if name in names:
                    full = self.broadcast_tensor(stage, weight, self.full_shapes[name])
                    yield name, full, self.broadcast_state(stage, tensors, shapes.get(name, {}))

    def optimizer_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return self.inner.optimizer_state(parameter)

    def updates(self, parameter: Tensor) -> bool:
        return self.inner.updates(parameter)

    def load_tensor(self, name: str, key: str, full: Tensor) -> None:
        if name in self.parameters:
            self.inner.load_tensor(name, key, full)

    def dropout_seed(self, first: int) -> int:
        return int(hash64(self.config.trainer.seed, first, self.pipeline.rank)[0])


class PipelinedModel(nn.Module):
    """All stages as one model, which all ranks of a replica call together.

    Args:
        stage_model: the stage of this rank
        pipeline: the ranks, in the order of their stages
    """

    def __init__(self, stage_model: Any, pipeline: DistributedContext) -> None:
        super().__init__()
        self.stage_model = stage_model
        self.pipeline = pipeline
        self.config = stage_model.config
        self.new_kv_caches = stage_model.new_kv_caches

    def forward(self, idx: Tensor, targets: None = None, caches: list[Any] | None = None) -> tuple[Tensor, None]:
        """(B, T) characters -> logits (B, T, V), on each rank"""
        x = idx
        last = self.pipeline.world_size - 1
        for stage in range(self.pipeline.world_size):
            if stage == self.pipeline.rank:
                x = self.stage_model(x, caches).float()
            else:
                width = self.config.vocab_size if stage == last else self.config.n_embd
                x = torch.empty(*idx.shape, width, device=idx.device)
            self.pipeline.broadcast_tensor(x, stage)
        return x, None


class _Stage(PipelineStage):
    """A stage that seeds and autocasts each forward pass like other strategies, with names for the profiler."""

    def __init__(self, inner: Strategy, pipeline: PipelineParallel, received: Tensor, sent: Tensor) -> None:
        group = pipeline.pipeline
        device = inner.context.device
        super().__init__(inner.model, group.rank, group.world_size, device, received, sent, group=group.group)
        self.autocast = inner.autocast
        self.dropout_seed = pipeline.dropout_seed
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
