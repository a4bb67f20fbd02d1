"""Validation loss and generated samples during training, with the same bits on any number of ranks."""

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from char_dataset import ValidationDataset
from mingpt.parallel.strategy import Strategy
from mingpt.text.tokenizer import Tokenizer

SAMPLE_LENGTH = 100  # tokens after the prompt
MAX_BATCH = 16  # windows in a forward pass if trainer.micro_batch_size is null
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE]


def evaluate(strategy: Strategy, data: ValidationDataset) -> float:
    """Returns the mean loss over all windows in nats per token, on all ranks.

    Batches have fixed bounds and one size, so that torch.compile compiles once; the last batch may go beyond the end of
    the data. Each batch is evaluated by one replica of the model, and losses of batches are added in order.
    """
    cfg = strategy.config.trainer
    # The last bits of a loss depend on the size, so the size must not depend on the number of ranks.
    size = cfg.micro_batch_size or min(cfg.batch_size, MAX_BATCH)
    batches = [range(start, start + size) for start in range(0, len(data), size)]
    replicas = strategy.replicas
    strategy.broadcast_buffers()
    # Mean loss and number of targets of each batch. Spare ranks also compute: sharded strategies gather.
    results = torch.zeros(len(batches) + replicas.world_size, 2, device=replicas.device)
    for first in range(0, len(batches), replicas.world_size):
        number = first + replicas.rank
        results[number] = torch.stack(strategy.evaluate(batches[min(number, len(batches) - 1)], data))
    losses, counts = replicas.all_reduce(results)[: len(batches)].cpu().double().T
    return ((losses * counts).sum() / counts.sum()).item()


def choose_prompt(text: str | None, tokens: np.ndarray, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that samples begin with.

    Args:
        text: trainer.sample_prompt; None: the first 20 tokens of the validation text
        tokens: (n,) validation text
    """
    if text is not None:
        return tokenizer.encode(text, "trainer.sample_prompt").tolist()
    return tokens[:20].tolist()


@torch.no_grad()
def generate_sample(strategy: Strategy, prompt: list[int], seed: int) -> list[int]:
    """Returns the prompt and the tokens that the model generates after it. All ranks must call it together.

    The random numbers are the same in each call, so that samples differ only because the model does.
    """
    device = strategy.context.device
    model = strategy.full_model
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.tensor([prompt], device=device)  # (1, T)
    # The window grows with each token. torch.compile would compile each new shape, and cuDNN would plan it.
    with strategy.autocast(), strategy.eager(), sdpa_kernel(NOT_CUDNN):
        tokens = [int(token) for token in model.generate(idx, SAMPLE_LENGTH, temperature=0.8, generator=generator)]
    model.train()
    return prompt + tokens
