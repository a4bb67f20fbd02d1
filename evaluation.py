"""How good is it on text that it has not seen, and what does it write? The same bits on any number of ranks."""

from __future__ import annotations

import torch

from char_dataset import ValidationDataset
from generation import stream
from state import TrainingState

SAMPLE = 100  # characters: enough to see letters become words


@torch.no_grad()
def validation_loss(state: TrainingState, validation: ValidationDataset) -> float:
    """The mean loss over the whole validation text, in nats per character.

    Batches have fixed bounds and are dealt out; each batch's loss travels on its own and they are added in order. Every
    rank makes equally many forward passes, as sharded strategies need.
    """
    knobs, world, windows = state.config.trainer, state.world, len(validation)
    size = knobs.micro_batch_size or knobs.batch_size
    batches = [range(start, min(start + size, windows)) for start in range(0, windows, size)]
    losses = torch.zeros(len(batches), device=world.device)
    state.model.eval()
    for start in range(0, len(batches), world.size):
        mine = start + world.rank
        loss = state.loss(state.model, *validation[batches[mine if mine < len(batches) else 0]])
        if mine < len(batches):
            losses[mine] = loss
    state.model.train()
    losses = world.sum(losses).cpu().double()
    counts = torch.tensor([validation.count(batch) for batch in batches], dtype=torch.float64)
    return ((losses * counts).sum() / counts.sum()).item()


@torch.no_grad()
def written_by(state: TrainingState) -> str:
    """What the model writes after the vocabulary's first character, mostly a line break; all ranks write together.

    The same random numbers choose each time, so that what changes is the model.
    """
    device = state.world.device
    generator = torch.Generator(device).manual_seed(state.config.trainer.seed)
    start = torch.zeros(1, dtype=torch.long, device=device)
    # A cache that grows has a new shape for each character, and each would be compiled.
    with state.autocast(), torch.compiler.set_stance("force_eager"):
        text = [int(new) for new in stream(state.model, [start], SAMPLE, temperature=0.8, generator=generator)]
    state.model.train()
    return "".join(state.corpus.vocabulary[token] for token in text)
