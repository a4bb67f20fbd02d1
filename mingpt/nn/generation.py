"""Text generation with cached keys and values, for several prompts at once."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model import GPT, KVCache

NO_TOKEN = -1  # no character is generated: the prompt is still being read, or the text is complete


@torch.no_grad()  # not inference_mode, whose tensors FSDP does not accept; callers without FSDP may enter it
def generate(
    model: GPT,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yields the next character of each text, (B,), one position at a time. Leaves the model in eval mode.

    While a longer prompt is still being read, NO_TOKEN is yielded for it, so each text is what it would be alone,
    except that all texts draw from one stream of random numbers. Keys and values are cached until the window is full;
    from then on it slides, which changes all positions, and each character takes a pass over the whole window.

    Args:
        model: on the prompts' device
        prompts: B tensors of (T,) tokens, T at least 1; only the last block_size of each count
        max_new_tokens: for each prompt
        temperature: divisor of the logits; 0 selects the most likely character
        top_k: sample from the k most likely characters only
        top_p: sample from the fewest characters whose probabilities add up to this (Holtzman et al., "The Curious Case
            of Neural Text Degeneration", 2020)
    """
    model.eval()
    block_size = model.config.block_size
    padded = pad_sequence([prompt[-block_size:] for prompt in prompts], batch_first=True, padding_value=NO_TOKEN)
    lengths = (padded != NO_TOKEN).sum(1)
    ends = lengths + max_new_tokens
    window = padded[:, : int(lengths.min())]
    caches: list[KVCache] = []
    for position in range(window.size(1), int(ends.max())):
        if not caches or caches[0].length == block_size:
            caches = model.new_kv_caches()
            uncached = window
        logits, _ = model(uncached, caches=caches)
        tokens = _sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
        if position < padded.size(1):
            tokens = torch.where(padded[:, position] == NO_TOKEN, tokens, padded[:, position])
        uncached = tokens[:, None]
        window = torch.cat((window, uncached), 1)[:, -block_size:]
        yield tokens.masked_fill((position < lengths) | (position >= ends), NO_TOKEN)


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Samples characters, (B,), from logits, (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        sorted_probs, order = probs.sort(descending=True)
        preceding = sorted_probs.cumsum(-1) - sorted_probs  # 0 for the most likely, which is always kept
        probs = probs.masked_fill((preceding >= top_p).gather(-1, order.argsort(-1)), 0.0)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]
