"""How does a model write on? One character after another, with keys and values cached, for several prompts at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model import GPT, KVCache

NO_TOKEN = -1  # no character: this prompt is still being read, or its text is long enough


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yields one new character for each prompt, (B,), after another, and leaves the model in eval mode.

    All texts grow in step: where one prompt is longer than another, its own characters are read while the other is
    written on, and NONE is yielded for it; so each text is what it would be alone, but for the random numbers, which
    they share. Keys and values are cached until the window is full; from then on it slides, so that all positions
    change and each character costs a pass over the window.

    Args:
        model: on the prompts' device
        prompts: B of them, (T,) characters each, T at least 1; the last block_size of them count
        max_new_tokens: how many characters to write to each
        temperature: 0 takes the likeliest; below 1 is tamer, above 1 wilder
        top_k: choose among so many likeliest characters only; None: all
        top_p: and among the fewest whose chances add up to this (Holtzman et al., "The Curious Case of Neural Text
            Degeneration", 2020); None: all
        generator: source of randomness
    """
    model.eval()
    size = model.config.block_size
    given = pad_sequence([prompt[-size:] for prompt in prompts], batch_first=True, padding_value=NO_TOKEN)
    lengths = (given != NO_TOKEN).sum(1)
    text = given[:, : int(lengths.min())]
    ends = lengths + max_new_tokens
    caches: list[KVCache] = []
    for at in range(text.size(1), int(ends.max())):
        window = text[:, -size:]
        if not caches or caches[0].seen == size:
            caches = [KVCache(size) for _ in model.blocks]
        logits, _ = model(window[:, caches[0].seen :], caches=caches)
        new = _choose(logits[:, -1].float(), temperature, top_k, top_p, generator)
        if at < given.size(1):
            new = torch.where(given[:, at] == NO_TOKEN, new, given[:, at])
        text = torch.cat((text, new[:, None]), 1)
        yield new.masked_fill((at < lengths) | (at >= ends), NO_TOKEN)


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """(B, V) logits -> (B,) characters."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        worst = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < worst, -math.inf)
    chances = logits.softmax(-1)
    if top_p is not None:
        falling, order = chances.sort(descending=True)
        likelier = falling.cumsum(-1) - falling  # the sum of all before: the likeliest stays whatever top_p is
        chances = chances.masked_fill((likelier >= top_p).gather(-1, order.argsort(-1)), 0.0)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]
