"""Validation loss and generated samples during training, with the same bits on any number of ranks."""

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from char_dataset import ValidationDataset
from mingpt.nn.generation import generate
from mingpt.parallel.strategy import Strategy
from mingpt.text.corpus import encode

SAMPLE_LENGTH = 100  # characters after the prompt
DEFAULT_PROMPT_LENGTH = 20  # characters
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE]


class Evaluation:
    """The mean loss over validation windows, computed in rounds, between which it can be broken off.

    Batches have fixed bounds and one size, so that torch.compile compiles once; the last one may go beyond the end of
    the data. Their losses are exchanged one by one and added in order.

    Args:
        batch_size: windows in a batch
    """

    def __init__(self, strategy: Strategy, data: ValidationDataset, batch_size: int) -> None:
        self.strategy = strategy
        self.data = data
        self.batches = [range(start, start + batch_size) for start in range(0, len(data), batch_size)]
        self.losses = torch.zeros(len(self.batches), device=strategy.context.device)
        self.batches_done = 0

    @property
    def is_done(self) -> bool:
        return self.batches_done == len(self.batches)

    def advance(self) -> None:
        """Evaluates the next batches, one on each rank."""
        first = self.batches_done
        last = min(first + self.strategy.batches_per_round, len(self.batches))
        self.losses[first:last] = self.strategy.evaluate_round(self.batches[first:last], self.data)
        self.batches_done = last

    def mean_loss(self) -> float:
        """The mean loss in nats per character, on all ranks."""
        losses = self.strategy.context.all_reduce(self.losses).cpu().double()
        counts = torch.tensor([self.data.count(batch) for batch in self.batches], dtype=torch.float64)
        return ((losses * counts).sum() / counts.sum()).item()


def evaluate(strategy: Strategy, data: ValidationDataset, batch_size: int) -> float:
    """The mean loss over all windows, in nats per character."""
    evaluation = Evaluation(strategy, data, batch_size)
    while not evaluation.is_done:
        evaluation.advance()
    return evaluation.mean_loss()


def choose_sample_prompt(prompt: str | None, tokens: np.ndarray, vocabulary: str) -> str:
    """Returns `trainer.sample_prompt`; if that is null, the first 20 characters of the validation text.

    Args:
        prompt: the key's value
        tokens: (n,) the validation text, n at least 1

    Raises:
        UserError: the text does not have one of the characters.
    """
    if prompt is None:
        return "".join(vocabulary[token] for token in tokens[:DEFAULT_PROMPT_LENGTH])
    encode(prompt, vocabulary, "trainer.sample_prompt")
    return prompt


@torch.no_grad()
def generate_sample(strategy: Strategy, vocabulary: str, prompt: str, seed: int) -> str:
    """The prompt and the text that the model generates after it, on all ranks together.

    The random numbers are the same in each call, so that samples differ only by the model.
    """
    device = strategy.context.device
    model = strategy.full_model
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.tensor([encode(prompt, vocabulary, "trainer.sample_prompt")], device=device)  # (1, T)
    # A growing cache has a new shape for each character: torch.compile would compile each, and cuDNN plan each.
    with strategy.autocast(), torch.compiler.set_stance("force_eager"), sdpa_kernel(NOT_CUDNN):
        text = [int(new) for new in generate(model, idx, SAMPLE_LENGTH, temperature=0.8, generator=generator)]
    model.train()
    return prompt + "".join(vocabulary[token] for token in text)
