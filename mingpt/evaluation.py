"""How good is it on text that it has not seen, and what does it write? The same bits on any number of ranks."""

from __future__ import annotations

import torch

from char_dataset import ValidationDataset
from mingpt.generation import generate
from state import TrainingState

SAMPLE_LENGTH = 100  # characters: enough to see letters become words


def evaluate(state: TrainingState, validation: ValidationDataset) -> float:
    """The mean loss over the whole validation text, in nats per character.

    Batches have fixed bounds, each batch's loss travels on its own, and they are added in order.
    """
    knobs, windows = state.config.trainer, len(validation)
    size = knobs.micro_batch_size or knobs.batch_size
    batches = [range(start, min(start + size, windows)) for start in range(0, windows, size)]
    losses = state.strategy.losses(batches, validation).cpu().double()
    counts = torch.tensor([validation.count(batch) for batch in batches], dtype=torch.float64)
    return ((losses * counts).sum() / counts.sum()).item()


@torch.no_grad()
def generate_sample(state: TrainingState) -> str:
    """What the model writes after the vocabulary's first character, mostly a line break; all ranks write together.

    The same random numbers choose each time, so that what changes is the model.
    """
    device, model = state.context.device, state.strategy.whole
    generator = torch.Generator(device).manual_seed(state.config.trainer.seed)
    start = torch.zeros(1, dtype=torch.long, device=device)
    # A cache that grows has a new shape for each character, and each would be compiled.
    with state.strategy.autocast(), torch.compiler.set_stance("force_eager"):
        text = [int(new) for new in generate(model, [start], SAMPLE_LENGTH, temperature=0.8, generator=generator)]
    model.train()
    return "".join(state.corpus.vocabulary[token] for token in text)
