"""How does a model train that no rank holds whole? Blocks dealt out in stages, and micro-batches one behind another.

Ranks are a mesh of replicas x stages: rank r has stage r % stages of replica r // stages. What stages send each other,
and in which order they compute, is torch.distributed.pipelining's (Huang et al., "GPipe: Efficient Training of Giant
Neural Networks using Pipeline Parallelism", 2019; 1F1B: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism
for DNN Training", 2019). What the ranks with one stage hold and exchange is a strategy's, of these ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import record_function

from char_dataset import IGNORE_INDEX, CharDataset, ValidationDataset, hash64
from mingpt.config import GPTConfig
from mingpt.distributed.process_group import DistributedContext, to_local
from mingpt.parallel.data_parallel import Strategy
from mingpt.parallel.memory import meta_model
from mingpt.utils.device import seed_device
from model import KVCache, Stage, cross_entropy

if TYPE_CHECKING:
    from mingpt.config import Config

TIED = "transformer.wte.weight"  # the first stage's embedding and the last one's output projection


def mesh(context: DistributedContext, stages: int) -> tuple[DistributedContext, DistributedContext, DistributedContext]:
    """The ranks with this rank's stage, one of each replica; those of its replica; and the first and last of these."""
    rows = [range(start, start + stages) for start in range(0, context.world_size, stages)]
    ends = [[row[0], row[-1]] for row in rows] + [[rank] for row in rows for rank in row[1:-1]]
    return context.subgroup(zip(*rows, strict=True)), context.subgroup(rows), context.subgroup(ends)


def stage_io(shape: GPTConfig, B: int, stage: int, stages: int) -> tuple[Tensor, Tensor]:
    """What goes into a stage and what comes out of it, on the meta device."""
    T = shape.block_size
    with torch.device("meta"):
        between = torch.empty(B, T, shape.n_embd, requires_grad=True)
        first, last = torch.empty(B, T, dtype=torch.long), torch.empty(B, T, shape.vocab_size)
    return (between if stage else first), (between if stage < stages - 1 else last)


class PipelineParallel(Strategy):
    """Each rank holds one stage, whole or what the strategy of its replicas leaves it, and passes activations on.

    Args:
        inner: what the ranks with this stage hold and exchange
        world: all ranks
        replica: those of this replica, in the order of their stages
        ends: the first and the last of them
        config: all sections
        shape: of the whole model
    """

    parts = True

    def __init__(
        self,
        inner: Strategy,
        context: DistributedContext,
        replica: DistributedContext,
        ends: DistributedContext,
        config: Config,
        shape: GPTConfig,
    ) -> None:
        self.inner, self.context, self.replica, self.ends, self.config = inner, context, replica, ends, config
        self.device, self.dtype = inner.device, inner.dtype
        self.parameters, self.optimizer, self.stepper = inner.parameters, inner.optimizer, inner.stepper
        self.scaler = inner.scaler
        self.whole = PipelinedModel(inner.whole, replica)  # type: ignore[assignment]
        parts = [meta_model(shape, stage, replica.world_size) for stage in range(replica.world_size)]
        self.names = [[name for name, _ in part.named_parameters()] for part in parts]
        self.names[-1].remove(TIED)  # which is the first stage's
        self.shapes = {name: weight for part in parts for name, weight in part.named_parameters()}

        self.size: int = config.trainer.micro_batch_size  # type: ignore[assignment]
        self.count = config.trainer.batch_size // inner.context.world_size // self.size
        self.stage = _Stage(inner, self.seed, shape, self.size, replica)
        kind = get_schedule_class(config.distributed.pipeline_schedule)
        self.schedule: Any = kind(self.stage, self.count, self._loss, scale_grads=False)
        context.exit_callbacks.append(self._let_go)
        how, idle = config.distributed.pipeline_schedule, replica.world_size - 1
        self.facts = {
            "pipeline": f"replicas x stages: {inner.context.world_size} x {replica.world_size}, {how}, {self.count} micro-batches of "
            f"{self.size}: each stage waits {idle / (self.count + idle):.0%} of the time"
        }

    def _let_go(self) -> None:
        del self.schedule, self.stage  # they hold what the inner strategy has let go

    def backward(self, batch: range, data: CharDataset) -> list[Tensor]:
        """As many micro-batches of one size as always: behind a short batch's end are dummies without targets."""
        share = self.size * self.count
        first = batch.start + self.inner.context.rank * share
        numbers = range(first, first + share)
        idx, targets = data[numbers]
        dummies = torch.arange(share) >= batch.stop - first
        targets = targets.masked_fill(dummies[:, None], IGNORE_INDEX)
        self.stage.firsts = numbers[:: self.size]
        self.factor = self.inner.factor / (len(batch) * targets.size(1))
        self.scaler.scale(torch.zeros((), device=self.device))  # ready for `unscale_` where there is no loss
        sums = self._run(self.schedule.step, idx, targets)
        if self.stage.is_first or self.stage.is_last:
            self.ends.all_reduce(to_local(self.parameters[TIED].grad))  # type: ignore[arg-type]
        if self.scaler.is_enabled():
            overflown = 0 * self.norm(self.parameters)  # NaN on all ranks if on one, so that all skip the step
            for parameter in self.parameters.values():
                to_local(parameter.grad).add_(overflown)  # type: ignore[arg-type]
        return [loss / (len(batch) * targets.size(1)) for loss in sums or [torch.zeros((), device=self.device)]]

    def _run(self, run: Any, idx: Tensor, targets: Tensor) -> list[Tensor]:
        """Takes a replica's share through the schedule; each micro-batch's loss, where this is the last stage."""
        self.sums: list[Tensor] = []
        inputs = [self.on_device(idx)] * self.stage.is_first
        run(*inputs, target=self.on_device(targets) if self.stage.is_last else None, return_outputs=False)
        return self.sums

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with record_function(f"loss {len(self.sums)}"), self.autocast():
            loss = cross_entropy(logits, targets, "sum")
        self.sums.append(loss.detach())
        return self.scaler.scale(loss * self.factor)

    @torch.no_grad()
    def losses(self, batches: list[range], data: ValidationDataset) -> Tensor:
        """Each replica takes as many batches at a time as there are micro-batches in a step."""
        losses, replica = torch.zeros(len(batches), device=self.context.device), self.inner.context
        self.whole.eval()
        for start in range(0, len(batches), self.count * replica.world_size):
            first = start + self.count * replica.rank
            mine = batches[first : first + self.count]
            idx = torch.zeros(self.count, self.size, data.block_size, dtype=torch.long)
            targets = torch.full_like(idx, IGNORE_INDEX)
            for i, batch in enumerate(mine):
                idx[i, : len(batch)], targets[i, : len(batch)] = data[batch]
            sums = self._run(self.schedule.eval, idx.flatten(0, 1), targets.flatten(0, 1))
            for i, (batch, total) in enumerate(zip(mine, sums, strict=False), start=first):
                losses[i] = total / data.count(batch)
        self.whole.train()
        return self.context.all_reduce(losses)

    def norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Over all stages; wte, which two have, counts once."""
        mine = {name: parameters[name] for name in self.names[self.replica.rank]}
        return self.replica.all_reduce(self.inner.norm(mine) ** 2).sqrt()

    def state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """The first replica's ranks, stage by stage, send all others what they hold."""
        layouts: dict[str, dict[str, Tensor]] = {}
        for layout in self.context.all_gather_object(
            {
                name: {key: torch.empty(t.shape, dtype=t.dtype, device="meta") for key, t in state.items()}
                for name, state in ((name, self.stepper.state.get(p)) for name, p in self.parameters.items())
                if state
            }
        ):
            layouts |= layout
        nothing: dict[str, Tensor] = {}
        for stage, names in enumerate(self.names):
            others = ((name, None, nothing) for name in names)
            held = self.inner.state() if stage == self.replica.rank else others
            for name, weight, state in held:
                if name in names:
                    likes = layouts.get(name, nothing)
                    yield (
                        name,
                        self._receive(weight, self.shapes[name], stage),
                        {key: self._receive(state.get(key), like, stage) for key, like in likes.items()},
                    )

    def put(self, name: str, key: str, whole: Tensor) -> None:
        """Where this rank's stage has it."""
        if name in self.parameters:
            self.inner.put(name, key, whole)

    def seed(self, first: int) -> int:
        """Each stage draws its own."""
        return int(hash64(self.config.trainer.seed, first, self.replica.rank)[0])


class PipelinedModel(nn.Module):
    """All stages as one model, for all ranks of a replica to call together: each goes on from what the one before says.

    Args:
        part: this rank's stage
        replica: the ranks, in the order of their stages
    """

    def __init__(self, part: Stage, replica: DistributedContext) -> None:
        super().__init__()
        self.part, self.replica, self.config = part, replica, part.config

    @property
    def blocks(self) -> list[nn.Module]:
        """This stage's, which are those that need a cache here."""
        return self.part.blocks  # type: ignore[return-value]

    def forward(self, idx: Tensor, targets: None = None, caches: list[KVCache] | None = None) -> tuple[Tensor, None]:
        """(B, T) characters -> logits (B, T, V), on each rank."""
        x, last = idx, self.replica.world_size - 1
        for stage in range(self.replica.world_size):
            if stage == self.replica.rank:
                x = self.part(x, caches).float()
            else:
                width = self.config.vocab_size if stage == last else self.config.n_embd
                x = torch.empty(*idx.shape, width, device=idx.device)
            self.replica.broadcast_tensor(x, stage)
        return x, None


class _Stage(PipelineStage):
    """A stage that seeds and casts each forward pass as other strategies do, and marks its work in a profiler's trace.

    Args:
        inner: whose model this is
        seed: first sample of a micro-batch -> seed of its random numbers
        shape: of the whole model
        size: sequences in a micro-batch
        replica: the ranks, in the order of their stages
    """

    def __init__(
        self, inner: Strategy, seed: Callable[[int], int], shape: GPTConfig, size: int, replica: DistributedContext
    ) -> None:
        inputs, outputs = stage_io(shape, size, replica.rank, replica.world_size)
        device = inner.context.device
        super().__init__(inner.model, replica.rank, replica.world_size, device, inputs, outputs, group=replica.group)
        self.autocast, self.seed = inner.autocast, seed
        self.firsts = range(0)  # the first sample of each micro-batch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch's."""
        if self.has_backward:
            seed_device(self.device, self.seed(self.firsts[fwd_chunk_id]))
        with _as_raised(), record_function(f"forward {fwd_chunk_id}"), self.autocast():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """One micro-batch's."""
        with _as_raised(), record_function(f"backward {bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


@contextmanager
def _as_raised() -> Iterator[None]:
    """Raises what was raised, of which the library makes a RuntimeError with a report: memory may have run out."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None
