"""Validation loss and generated samples during training, with the same bits on any number of ranks."""

from typing import Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mingpt.generation import generate
from mingpt.parallel.data_parallel import Strategy, WindowDataset

SAMPLE_LENGTH = 100  # characters
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE]


class ValidationWindows(WindowDataset, Protocol):
    """Windows of the validation text, in order."""

    def __len__(self) -> int: ...

    def count(self, windows: range) -> int:
        """The number of targets in these windows."""


def evaluate(strategy: Strategy, data: ValidationWindows, batch_size: int) -> float:
    """The mean loss over the whole validation text, in nats per character.

    Batches have fixed bounds; their losses are exchanged one by one and added in order.
    """
    batches = [range(start, min(start + batch_size, len(data))) for start in range(0, len(data), batch_size)]
    losses = strategy.evaluate_batches(batches, data).cpu().double()
    counts = torch.tensor([data.count(batch) for batch in batches], dtype=torch.float64)
    return ((losses * counts).sum() / counts.sum()).item()


@torch.no_grad()
def generate_sample(strategy: Strategy, vocabulary: str, seed: int) -> str:
    """Text that the model generates after the first character of the vocabulary, on all ranks together.

    The random numbers are the same in each call, so that samples differ only by the model.
    """
    device, model = strategy.context.device, strategy.full_model
    generator = torch.Generator(device).manual_seed(seed)
    start = torch.zeros(1, dtype=torch.long, device=device)
    # A growing cache has a new shape for each character: torch.compile would compile each, and cuDNN plan each.
    with strategy.autocast(), torch.compiler.set_stance("force_eager"), sdpa_kernel(NOT_CUDNN):
        text = [int(new) for new in generate(model, [start], SAMPLE_LENGTH, temperature=0.8, generator=generator)]
    model.train()
    return "".join(vocabulary[token] for token in text)
