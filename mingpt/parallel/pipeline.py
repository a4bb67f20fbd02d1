"""Pipeline parallelism: blocks are split into stages, and micro-batches pass through the stages one after another.

Ranks form a mesh of replicas x stages: rank r has stage r % stages of replica r // stages. torch.distributed.pipelining
provides schedules and communication (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., "PipeDream: Generalized
Pipeline Parallelism for DNN Training", 2019). The ranks with the same stage use any data-parallel strategy.
"""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from mingpt.config.schema import Config
from mingpt.distributed.agreement import all_gather_object
from mingpt.distributed.context import DistributedContext, PendingNumbers
from mingpt.errors import UserError
from mingpt.optim.muon import to_local
from mingpt.parallel.state import FullState, layout, parameter_names, state_layouts
from mingpt.parallel.strategy import MicroBatch, Strategy
from model import GPT

WTE = "transformer.wte"  # in the first stage and, with tied weights, also in the last stage


class Stages:
    """The stages of a model. On each rank, the parts of other stages are removed from it; names of parameters stay.

    Attributes:
        model: the stage of this rank
        replicas: ranks with the same stage, one of each replica
        pipeline: ranks of one replica, in the order of their stages
        tied_embedding: ranks of the first and last stage of a replica; not used on other ranks
        stage_of: index of the stage of each tensor in the state dict of the whole model
        full_shapes: tensors on the meta device with the shapes of that state dict
        ties_weights: whether the head is the embedding, which the first and the last stage have
        width: last dimension of the tensor that stages exchange for each micro-batch

    Raises:
        UserError: on all ranks, if the model can't be split.
    """

    def __init__(self, model: GPT, context: DistributedContext, config: Config) -> None:
        num_stages = config.distributed.pipeline_stages
        replicas = [range(start, start + num_stages) for start in range(0, context.world_size, num_stages)]
        # Groups from PyTorch's init_device_mesh would have the default timeout.
        self.replicas = context.subgroup(zip(*replicas, strict=True))
        self.pipeline = context.subgroup(replicas)
        self.tied_embedding = context.subgroup([(ranks[0], ranks[-1]) for ranks in replicas])
        self.block_size = config.data.block_size
        self.full_shapes = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self.width = model.embed(torch.zeros(1, 1, dtype=torch.long)).size(-1)
        self.ties_weights = not hasattr(model, "lm_head")
        self.model = model
        self.is_first = self.pipeline.rank == 0
        self.is_last = self.pipeline.rank == num_stages - 1
        names_of_parameters = parameter_names(model)
        self._remove_other_stages()

        owners = all_gather_object(self.pipeline, list(model.state_dict()))
        self.stage_of: dict[str, int] = {}
        for stage in reversed(range(num_stages)):  # the first stage that has a tensor saves it
            self.stage_of |= dict.fromkeys(owners[stage], stage)
        several = []
        for names in names_of_parameters:
            num_owners = sum(any(name in owned for name in names) for owned in owners)
            if num_owners > 1 and names != [f"{WTE}.weight"]:
                several.append(" = ".join(names))
        if several:
            raise UserError(
                f"distributed.pipeline_stages is {num_stages}, must be 1 for this model.py: several stages have "
                f"{', '.join(several)}; a parameter must belong to a block, wte, wpe, ln_f or lm_head"
            )

    def _remove_other_stages(self) -> None:
        transformer = self.model.transformer
        mine = self.pipeline.shard(range(self.model.config.n_layer))
        for number in self.model.blocks:
            if number not in mine:
                del transformer["h"][str(number)]  # type: ignore[operator]
        ends = [] if self.is_first else ["wpe", "wte"]
        if self.is_last and self.ties_weights:
            ends.remove("wte")
        if not self.is_last:
            ends.append("ln_f")
            if not self.ties_weights:
                del self.model.lm_head
        for name in ends:
            if name in transformer:
                del transformer[name]

    def io_shapes(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Returns tensors on the meta device like those that this stage receives and sends; the last sends its loss."""
        shape = (batch_size, self.block_size)
        received = sent = torch.empty(*shape, self.width, requires_grad=True, device="meta")
        if self.is_first:
            received = torch.empty(shape, dtype=torch.long, device="meta")
        if self.is_last:
            sent = torch.empty((), device="meta")
        return received, sent

    def example(self) -> tuple[Tensor, Tensor]:
        """Returns arguments of the model."""
        received, _ = self.io_shapes(1)
        device = self.pipeline.device
        targets = torch.zeros(1, self.block_size, dtype=torch.long, device=device)
        return torch.zeros_like(received, device=device), targets


class PipelineParallel(Strategy):
    """Each rank holds one stage, in full or sharded over the replicas, and exchanges activations with its neighbors.

    Optimizer, scaler and parameters belong to `inner`.

    Args:
        stages: the stages of the model
        inner: data-parallel strategy of the ranks with the same stage
        context: all ranks
    """

    def __init__(self, stages: Stages, inner: Strategy, context: DistributedContext) -> None:
        vars(self).update(vars(inner))
        self.stages = stages
        self.inner = inner
        self.context = context
        self.replicas = stages.replicas
        self.pipeline = stages.pipeline
        self.full_shapes = stages.full_shapes
        self.full_model = PipelinedModel(stages)

        cfg = self.config.trainer
        self.micro_batch_size = cfg.micro_batch_size or cfg.batch_size  # conflicts.py refuses null
        self.num_micro_batches = cfg.batch_size // self.replicas.world_size // self.micro_batch_size  # of a replica
        self.stage = _Stage(stages, inner, self.micro_batch_size)
        self.losses: list[Tensor] = []  # terms of the mean loss over the batch
        name = self.config.distributed.pipeline_schedule
        schedule = get_schedule_class(name)
        self.schedule: Any = schedule(self.stage, self.num_micro_batches, self._loss, scale_grads=False)
        context.exit_callbacks.append(self._release)
        self.description = inner.description | {
            "pipeline": f"replicas x stages: {self.replicas.world_size} x {self.pipeline.world_size}, {name}, "
            f"{self.num_micro_batches} micro-batches of {self.micro_batch_size}"
        }

    @property
    def state(self) -> dict[str, Tensor]:
        return self.inner.state

    def _release(self) -> None:
        # All of them refer to the model that the inner strategy has released.
        del self.schedule
        del self.stage
        del self.model

    def shares(self, batch: range) -> list[range]:
        """Returns the sample numbers of this replica's micro-batches, which may extend beyond a short batch."""
        size = self.micro_batch_size
        first = batch.start + self.replicas.rank * size * self.num_micro_batches
        return [range(first + size * i, first + size * (i + 1)) for i in range(self.num_micro_batches)]

    def count_targets(self, micro_batches: list[MicroBatch]) -> int:
        return super().count_targets(micro_batches) if self.stages.is_first else 0  # all stages have the same targets

    def forward_backward(self, micro_batches: list[MicroBatch], target_counts: PendingNumbers) -> list[Tensor]:
        """Runs the schedule. The first stage gets the tokens, and the last stage the targets."""
        self.stage.micro_batches = micro_batches
        self.losses = []
        inputs: tuple[Tensor, ...] = ()
        options: dict[str, Tensor] = {}
        if self.stages.is_first:
            inputs = self.to_device(torch.cat([each.idx for each in micro_batches]))
        if self.stages.is_last:
            [options["targets"]] = self.to_device(torch.cat([each.targets for each in micro_batches]))
            weights = torch.tensor([each.weight(target_counts) for each in micro_batches])
            [options["target"]] = self.to_device(weights)  # the second argument of `_loss`
        try:
            self.schedule.step(*inputs, **options, return_outputs=False)
        except RuntimeError as error:  # PyTorch wraps the errors of a stage, such as out-of-memory errors
            raise error.__cause__ or error from None
        self._reduce_tied_embedding()
        return self.losses or [torch.zeros((), device=self.device)]

    def _loss(self, mean: Tensor, weight: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, from the mean loss that the last stage returns and its weight, (1,)."""
        loss = mean * weight[0]
        self.losses.append(loss.detach())
        return self.inner.scale_loss(loss)

    def _reduce_tied_embedding(self) -> None:
        """Adds up the gradients of the embedding in the first stage and in the last stage, whose head it is."""
        if not self.stages.ties_weights:
            return
        for name, parameter in self.parameters.items():
            if name.startswith(f"{WTE}.") and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.stages.tied_embedding.all_reduce(to_local(parameter.grad))

    def total_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the total norm over all stages. A tied wte, which two stages hold, counts once."""
        mine = {name: tensor for name, tensor in tensors.items() if self.stages.stage_of[name] == self.pipeline.rank}
        return self.pipeline.all_reduce(self.inner.total_norm(mine) ** 2).sqrt()

    def iter_full_state(self) -> FullState:
        """Yields the full state. Each rank of the first replica broadcasts its stage's part."""
        layouts = ChainMap(*all_gather_object(self.context, state_layouts(self.local_state)))
        inner_state = self.inner.iter_full_state()
        for name, like in self.full_shapes.items():
            source = self.stages.stage_of[name]
            mine: dict[str, Tensor] = {}
            if source == self.pipeline.rank:
                _, weight, state = next(item for item in inner_state if item[0] == name)
                mine = {name: weight, **state}
            weight = self.broadcast(mine, name, layout(like), source)
            state = {key: self.broadcast(mine, key, each, source) for key, each in layouts.get(name, {}).items()}
            yield name, weight, state

    def shard_of(self, full: Tensor, like: Tensor) -> Tensor:
        return self.inner.shard_of(full, like)


class PipelinedModel(nn.Module):
    """All stages as one model. All ranks of a replica must call it together."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self.stage_model = stages.model
        self.pipeline = stages.pipeline
        self.width = stages.width
        self.config = stages.model.config

    generate = GPT.generate

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Returns, on each rank, the logits of tokens without targets, or None and the loss of tokens with targets."""
        rank = self.pipeline.rank
        last = self.pipeline.world_size - 1
        x = idx
        for stage in range(last):
            if stage == rank:
                x = self.stage_model(x)[0].float()
            else:
                x = torch.empty(*idx.shape, self.width, device=idx.device)
            self.pipeline.broadcast_tensor(x, stage)
        shape = () if targets is not None else (*idx.shape, self.config.vocab_size)
        result = torch.empty(shape, device=idx.device)
        if rank == last:
            logits, loss = self.stage_model(x, targets)
            result.copy_(logits[..., : self.config.vocab_size] if loss is None else loss)
        self.pipeline.broadcast_tensor(result, last)
        return (result, None) if targets is None else (None, result)


class _Stage(PipelineStage):
    """A stage that seeds and autocasts each forward pass like other strategies."""

    def __init__(self, stages: Stages, inner: Strategy, batch_size: int) -> None:
        ranks = stages.pipeline
        shapes = stages.io_shapes(batch_size)
        super().__init__(inner.model, ranks.rank, ranks.world_size, ranks.device, *shapes, group=ranks.group)
        self.inner = inner
        self.micro_batches: list[MicroBatch] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.inner.seed(self.micro_batches[fwd_chunk_id].first, self.stage_index)
        with self.inner.autocast():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        output, loss = super().forward_maybe_with_nosync(*args, **kwargs)
        return output if loss is None else loss
