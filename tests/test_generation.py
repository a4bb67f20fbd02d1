"""What a model writes: the same with a cache as without, alone as with others, and as often as it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import T, V, random_gpt, random_tokens, small_gpt
from torch import Tensor

from mingpt.generation import NO_TOKEN, generate
from model import GPT

pytestmark = pytest.mark.usefixtures("one_thread")


def written(model: GPT, idx: Tensor, number: int, **choice: Any) -> Tensor:
    """(B, T) prompts -> (B, number) new characters."""
    return torch.stack(list(generate(model, list(idx), number, **choice)), 1)


def recomputed(model: GPT, idx: Tensor, number: int) -> Tensor:
    """Greedy text without a cache: a full pass over the last characters for each new one."""
    for _ in range(number):
        idx = torch.cat((idx, model(idx[:, -T:])[0][:, -1].argmax(-1, keepdim=True)), 1)
    return idx


@pytest.mark.parametrize("prompt", [1, 3, T - 1, T, T + 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_cached_greedy_text_equals_recomputed_text_within_the_window_and_beyond(batch: int, prompt: int) -> None:
    model, idx = random_gpt(), random_tokens(batch, prompt)
    expected = recomputed(model, idx, 3 * T)
    assert len(expected[:, prompt:].unique()) >= 3  # else the test would see little
    for choice in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}):
        assert torch.equal(written(model, idx, 3 * T, **choice), expected[:, prompt:])
    assert list(generate(model, list(idx), 0)) == []


def test_the_cache_saves_work_until_the_window_is_full() -> None:
    model, seen = small_gpt(), []
    model.transformer.drop.register_forward_hook(lambda module, args, output: seen.append(output.size(1)))
    written(model, random_tokens(1, 3), T)
    assert seen == [3, 1, 1, 1, 1, 1, T, T]


def test_a_seeded_generator_repeats_its_text() -> None:
    model, idx = small_gpt(), random_tokens(2, 3)
    first, again, other = (written(model, idx, 40, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 40)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, None), (0.5, None, None), (2.0, 3, None), (1.0, 10 * V, None), (1.0, None, 0.7), (1.5, 6, 0.5)],
)
def test_characters_come_as_often_as_the_model_says(temperature: float, top_k: int | None, top_p: float | None) -> None:
    model, number = small_gpt(), 20_000
    with torch.no_grad():
        model.transformer.wte.weight.mul_(5)  # some are likelier than others
    idx = random_tokens(1, 2).expand(number, -1)
    logits = model(idx[:1])[0][0, -1] / temperature
    if top_k is not None:
        logits[logits.argsort(descending=True)[top_k:]] = -math.inf
    chance = logits.softmax(-1)
    if top_p is not None:
        likeliest, total = [], 0.0
        for token in chance.argsort(descending=True).tolist():
            if total < top_p:
                likeliest.append(token)
                total += chance[token].item()
        assert 1 < len(likeliest) < (top_k or V)
        chance = torch.zeros(V).index_put((torch.tensor(likeliest),), chance[likeliest] / total)
    assert chance.max() < 0.9
    choice = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    new = written(model, idx, 1, generator=torch.Generator().manual_seed(0), **choice)[:, -1]
    found = new.bincount(minlength=V) / number
    assert ((found - chance).abs() <= 5 * (chance * (1 - chance) / number).sqrt()).all()


def test_generating_with_dropout_is_the_same_as_without() -> None:
    idx = random_tokens(1, 3)
    with_dropout, without = random_gpt(dropout=0.5).train(), random_gpt(dropout=0.0)
    assert torch.equal(written(with_dropout, idx, 20, temperature=0), written(without, idx, 20, temperature=0))


@pytest.mark.parametrize("lengths", [(1, 3, T + 5), (T, T + 1, 2), (4, 4)])
def test_each_of_several_prompts_goes_on_as_it_would_alone(lengths: tuple[int, ...]) -> None:
    model, number = random_gpt(), 2 * T
    prompts = [random_tokens(length, seed=length + i) for i, length in enumerate(lengths)]
    news = torch.stack(list(generate(model, prompts, number, temperature=0)), 1)
    for prompt, row in zip(prompts, news, strict=True):
        alone = recomputed(model, prompt[None], number)[0, len(prompt) :]
        assert torch.equal(row[row != NO_TOKEN], alone)
        assert (row[row != NO_TOKEN] >= 0).all()
