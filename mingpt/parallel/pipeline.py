"""Pipeline parallelism: blocks are split into stages, and micro-batches pass through the stages one after another.

Ranks form a mesh of replicas x stages: rank r has stage r % stages of replica r // stages. torch.distributed.pipelining
provides schedules and communication (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., "PipeDream: Generalized
Pipeline Parallelism for DNN Training", 2019). The ranks with the same stage use any data-parallel strategy.
"""

import math
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import record_function

from char_dataset import CharDataset
from mingpt.config.schema import Config
from mingpt.distributed.agreement import reduce_object, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.errors import UserError
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.optim.muon import to_local
from mingpt.parallel.data_parallel import build_data_parallel
from mingpt.parallel.strategy import DTYPES, MicroBatch, Strategy, layout, state_layouts, tied_names
from mingpt.system.device import seed_device
from model import GPT, KVCache

WTE = "transformer.wte"  # in the first stage and, with tied weights, also in the last stage
MODULES_OF_ENDS = {WTE: 0, "transformer.wpe": 0, "transformer.ln_f": -1, "lm_head": -1}  # index of stage


def find_stage(name: str, n_layer: int, num_stages: int) -> int | None:
    """Returns the index of the stage that has a parameter or buffer, or None if the name does not tell.

    Without lm_head, the last stage also has wte, which belongs to the first stage.
    """
    for module, stage in MODULES_OF_ENDS.items():
        if name.startswith(f"{module}."):
            return stage % num_stages
    if not name.startswith("transformer.h."):
        return None
    block = int(name.split(".")[2])
    ends = [n_layer * (index + 1) // num_stages for index in range(num_stages)]
    return bisect_right(ends, block)


def find_stages(model: GPT, num_stages: int) -> dict[str, int]:
    """Returns the index of the stage of each tensor in the state dict of a model. A stage may have others as well.

    Raises:
        UserError: the stage of a parameter is unknown, or several stages have it.
    """
    stages = {name: find_stage(name, model.config.n_layer, num_stages) for name in model.state_dict()}
    problem = f"distributed.pipeline_stages is {num_stages}, must be 1 for this model.py"
    if unknown := [name for name, _ in model.named_parameters() if stages[name] is None]:
        raise UserError(
            f"{problem}: the stage of {', '.join(unknown)} is unknown; parameters must belong to a block, or to "
            f"{', '.join(MODULES_OF_ENDS)}"
        )
    for names in tied_names(model):
        if len({stages[name] for name in names}) > 1:
            raise UserError(f"{problem}: {' and '.join(names)} are one parameter, but belong to different stages")
    return {name: stage or 0 for name, stage in stages.items()}  # all stages have other buffers


class GPTStage(GPT):
    """Consecutive blocks of a GPT, with the embeddings in the first stage and the output projection in the last stage.

    Blocks are distributed evenly. Modules and parameters have the same names as in the GPT.

    Args:
        model: a GPT, which lends its modules and can't be used afterwards
    """

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(model))
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        modules = dict(self.named_modules())
        for name in [*MODULES_OF_ENDS, *(f"transformer.h.{number}" for number in self.blocks)]:
            is_head = name == WTE and self.is_last and "lm_head" not in modules
            is_mine = is_head or find_stage(f"{name}.", self.config.n_layer, num_stages) == index
            if name in modules and not is_mine:
                parent, _, child = name.rpartition(".")
                delattr(modules[parent], child)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:  # type: ignore[override]
        """(B, T) tokens in the first stage, else (B, T, C) -> logits (B, T, V) in the last stage, else (B, T, C)"""
        if self.is_first:
            x = self.embed(x, cache)
        x = self.apply_blocks(x, cache)
        return self.unembed(x) if self.is_last else x

    def io_shapes(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Returns tensors like the input and the output of `forward`, on the meta device."""
        shape = (batch_size, self.config.block_size)
        received = sent = torch.empty(*shape, self.config.n_embd, requires_grad=True, device="meta")
        if self.is_first:
            received = torch.empty(shape, dtype=torch.long, device="meta")
        if self.is_last:
            sent = torch.empty(*shape, self.config.vocab_size, device="meta")
        return received, sent


class PipelineParallel(Strategy):
    """Each rank holds one stage, in full or sharded over the replicas, and exchanges activations with its neighbors.

    Optimizer, scaler and parameters belong to `inner`.

    Attributes:
        inner: data-parallel strategy of the ranks with the same stage, one rank of each replica
        pipeline: ranks of one replica, in the order of their stages
        tied_embedding: ranks of the first and last stage of a replica; not used on other ranks
    """

    is_sharded = True

    def __init__(self, model: GPT, context: DistributedContext, config: Config, precision: str) -> None:
        self.context = context
        self.config = config
        self.dtype = DTYPES[precision]
        num_stages = config.distributed.pipeline_stages
        replicas = [range(start, start + num_stages) for start in range(0, context.world_size, num_stages)]
        # Groups from PyTorch's init_device_mesh would have the default timeout.
        data_parallel = context.subgroup(zip(*replicas, strict=True))
        self.pipeline = context.subgroup(replicas)
        self.tied_embedding = context.subgroup([(ranks[0], ranks[-1]) for ranks in replicas])

        self.full_shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in model.state_dict().items()
        }
        with shared_errors(context):
            self.stage_of = find_stages(model, num_stages)
            if context.rank == 0:
                self._check_loss(model, num_stages)
        self.ties_weights = not hasattr(model, "lm_head")
        my_stage = GPTStage(model, self.pipeline.rank, num_stages)
        received, _ = my_stage.io_shapes(batch_size=1)
        example = torch.zeros_like(received, device=context.device)
        self.inner = inner = build_data_parallel(my_stage, data_parallel, config, precision, (example,))
        self.replicas = data_parallel
        self.device = inner.device
        self.scaler = inner.scaler
        self.parameters = inner.parameters
        self.buffers = inner.buffers
        self.local_state = inner.local_state
        self.optimizer = inner.optimizer
        self.full_model = PipelinedModel(inner.full_model, self.pipeline)

        self.size = config.trainer.micro_batch_size or config.trainer.batch_size  # conflicts.py refuses null
        self.count = config.trainer.batch_size // len(replicas) // self.size  # micro-batches per replica
        self.stage = _Stage(inner, self.pipeline, *my_stage.io_shapes(self.size))
        schedule = config.distributed.pipeline_schedule
        self.schedule: Any = get_schedule_class(schedule)(self.stage, self.count, self._loss, scale_grads=False)
        context.exit_callbacks.append(self._release)
        waits = num_stages - 1
        self.description = inner.description | {
            "pipeline": f"replicas x stages: {len(replicas)} x {num_stages}, {schedule}, {self.count} micro-batches of "
            f"{self.size}: each stage waits {waits / (self.count + waits):.0%} of the time"
        }

    @property
    def state(self) -> dict[str, Tensor]:
        return self.inner.state

    def _check_loss(self, model: GPT, num_stages: int) -> None:
        """Raises a UserError if a pass in training has another loss, or changes buffers in another way, in stages."""
        problem = f"distributed.pipeline_stages is {num_stages}, must be 1 for this model.py"
        whole = deepcopy(model)
        generator = torch.Generator().manual_seed(0)
        for parameter in whole.parameters():  # zeros, with which some projections begin, would hide a block
            if parameter.is_floating_point():
                parameter.data.add_(torch.empty_like(parameter.data).normal_(std=0.1, generator=generator))
        weights = dict(whole.named_parameters(remove_duplicate=False))
        stages = []
        for index in range(num_stages):
            # All stages share memory. Those that use a parameter of another one, such as from a list, have the old one.
            old = {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()}
            stage = GPTStage(deepcopy(model, old), index, num_stages)
            for name, parameter in stage.named_parameters():
                parameter.data = weights[name].data
            stages.append(stage)
        size = min(256, model.config.block_size)
        idx = torch.arange(-(size // 2), size - size // 2)[None] % model.config.vocab_size
        targets = idx.roll(-1, 1)
        seed_device(idx.device, 0)
        expected = self.compute_loss(whole, idx, targets).item()
        seed_device(idx.device, 0)
        x = idx
        try:
            with self.autocast():
                for stage in stages:
                    x = stage(x)
                loss = stages[-1].loss(x, targets).item()
        except Exception as error:
            raise UserError(f"{problem}: in stages, it raises {error!r}") from error
        if not math.isclose(loss, expected, rel_tol=1e-4):
            raise UserError(
                f"{problem}: with random weights, the loss of the whole model is {expected:.4f}, but {loss:.4f} in "
                "stages, which call only embed, apply_blocks, unembed and loss of GPT"
            )
        state = whole.state_dict()
        stage_states = [stage.state_dict() for stage in stages]
        for name, index in self.stage_of.items():
            if not torch.equal(stage_states[index][name], state[name]):
                raise UserError(f"{problem}: several stages change the buffer {name}, or not the stage that saves it")

    def broadcast_buffers(self) -> None:
        self.inner.broadcast_buffers()

    def _release(self) -> None:
        # Both refer to the model that the inner strategy has released.
        del self.schedule
        del self.stage

    def micro_batches(self, batch: range) -> list[MicroBatch]:
        """Returns this replica's share, which the schedule divides. It may extend beyond the end of a short batch."""
        share = self.size * self.count
        first = batch.start + self.replicas.rank * share
        return [MicroBatch(range(first, first + share), batch)]

    def forward_backward(self, micro_batch: MicroBatch, data: CharDataset) -> Tensor:
        """Runs the schedule. Samples without targets fill up a short batch."""
        indices = micro_batch.indices
        batch = micro_batch.batch
        idx, targets = data[indices]
        is_filler = torch.tensor([number >= batch.stop for number in indices])
        targets = targets.masked_fill(is_filler[:, None], IGNORE_INDEX)
        parts = [range(first, min(first + self.size, batch.stop)) for first in indices[:: self.size]]
        self.stage.parts = [(MicroBatch(part, batch).weight(data), part.start) for part in parts]
        self.stage.losses = []
        self.scaler.scale(torch.zeros((), device=self.device))  # without a scaled loss, `unscale_` raises an error
        inputs = self.to_device(idx.contiguous()) if self.stage.is_first else ()  # for PyTorch < 2.13
        target = self.to_device(targets)[0] if self.stage.is_last else None
        try:
            self.schedule.step(*inputs, target=target, return_outputs=False)
        except RuntimeError as error:  # PyTorch wraps the errors of a stage, such as out-of-memory errors
            raise error.__cause__ or error from None
        losses = self.stage.losses or [torch.zeros((), device=self.device)]
        return torch.stack(losses).sum()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of a micro-batch. The schedule calls this method in the last stage."""
        with self.autocast():
            loss = self.inner.full_model.loss(logits, targets) * self.stage.weight
        self.stage.losses.append(loss.detach())
        return self.inner.scale_loss(loss)

    def reduce_gradients(self, batch: range, losses: list[Tensor]) -> list[Tensor]:
        """Adds up the gradients of tied embeddings in the first and last stage."""
        if self.ties_weights:
            for name, parameter in self.parameters.items():
                if name.startswith(f"{WTE}.") and parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    self.tied_embedding.all_reduce(to_local(parameter.grad))
        self.inner.check_gradients()
        if self.scaler.is_enabled():
            overflow = 0 * self.total_norm(self.gradients)  # NaN if a stage overflows, so all ranks skip the step
            for gradient in self.gradients.values():
                to_local(gradient).add_(overflow)
        return losses

    def total_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the total norm over all stages. A tied wte, which two stages hold, counts once."""
        mine = {name: tensor for name, tensor in tensors.items() if self.stage_of[name] == self.pipeline.rank}
        return self.pipeline.all_reduce(self.inner.total_norm(mine) ** 2).sqrt()

    def iter_full_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Yields the full state. Each rank of the first replica broadcasts its stage's part."""
        parts = state_layouts(self.local_state)
        layouts = reduce_object(self.context, parts, lambda parts: dict(ChainMap(*parts)))
        inner_state = self.inner.iter_full_state()
        for name, like in self.full_shapes.items():
            source = self.stage_of[name]
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
    """All stages as one model. All ranks of a replica must call it together.

    Args:
        stage_model: stage of this rank
        pipeline: ranks of the replica, in the order of their stages
    """

    def __init__(self, stage_model: GPTStage, pipeline: DistributedContext) -> None:
        super().__init__()
        self.stage_model = stage_model
        self.pipeline = pipeline
        self.config = stage_model.config

    generate = GPT.generate

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns logits and loss like `GPT.forward`, on each rank."""
        x = idx
        last = self.pipeline.world_size - 1
        for stage in range(self.pipeline.world_size):
            if stage == self.pipeline.rank:
                x = self.stage_model(x, cache).float()
            else:
                width = self.config.vocab_size if stage == last else self.config.n_embd
                x = torch.empty(*idx.shape, width, device=idx.device)
            self.pipeline.broadcast_tensor(x, stage)
        return x, None if targets is None else self.stage_model.loss(x, targets)


class _Stage(PipelineStage):
    """A stage that seeds and autocasts each forward pass like other strategies, and names passes for the profiler."""

    def __init__(self, inner: Strategy, pipeline: DistributedContext, received: Tensor, sent: Tensor) -> None:
        device = inner.context.device
        super().__init__(inner.model, pipeline.rank, pipeline.world_size, device, received, sent, group=pipeline.group)
        self.inner = inner
        self.parts: list[tuple[float, int]] = []  # weight and first sample of each micro-batch
        self.losses: list[Tensor] = []  # parts of the mean loss over the batch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.weight, first = self.parts[fwd_chunk_id]
        self.inner.seed_dropout(first, self.stage_index)
        with record_function(f"forward {fwd_chunk_id}"), self.inner.autocast():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with record_function(f"backward {bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
