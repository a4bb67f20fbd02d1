"""Text generation with cached keys and values."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from model import GPT, KVCache


@torch.no_grad()  # not inference_mode, because FSDP does not accept its tensors; callers without FSDP may enter it
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yields the next characters (B,), one position at a time. Leaves the model in eval mode.

    Keys and values are cached until the window is full. From then on the window slides, which changes all positions,
    so each character takes a pass over the whole window.

    Args:
        model: on the device of the prompts
        idx: prompts of one length (B, T); only the last block_size characters are used
        temperature: divisor of the logits; 0 selects the most likely character
        top_k: sample from the k most likely characters only
        top_p: sample from the fewest characters whose probabilities add up to this (Holtzman et al., "The Curious Case
            of Neural Text Degeneration", 2020)
    """
    model.eval()
    block_size = model.config.block_size
    window = idx[:, -block_size:]
    caches: list[KVCache] = []
    for _ in range(max_new_tokens):
        if not caches or caches[0].length == block_size:
            caches = model.new_kv_caches()
            uncached = window
        logits, _ = model(uncached, caches=caches)
        tokens = _sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
        uncached = tokens[:, None]
        window = torch.cat((window, uncached), 1)[:, -block_size:]
        yield tokens


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Samples characters (B,) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        sorted_probs, order = probs.sort(descending=True)
        preceding = sorted_probs.cumsum(-1) - sorted_probs  # 0 for the most likely character, which is always kept
        probs = probs.masked_fill((preceding >= top_p).gather(-1, order.argsort(-1)), 0.0)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]
