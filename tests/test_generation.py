import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt.nn.layers import embedding
from model import GPT
from tests.inside import T, V, random_gpt, random_tokens, small_gpt


def generate_all(model: GPT, idx: Tensor, number: int, **options: Any) -> Tensor:
    """Returns new characters (B, number) for prompts (B, T)."""
    return torch.stack(list(model.generate(idx, number, **options)), 1)


@pytest.mark.parametrize(("batch", "prompt"), [(3, 1), (1, T - 1), (3, T + 5)])
def test_greedy_text_takes_the_likeliest_token_of_the_window_and_has_no_dropout(batch: int, prompt: int) -> None:
    model, idx = random_gpt(dropout=0.5).train(), random_tokens(batch, prompt)
    again, whole = random_gpt(), idx
    for _ in range(2 * T):
        new = again(whole[:, -T:])[0][:, -1].argmax(-1, keepdim=True)
        whole = torch.cat((whole, new), 1)
    expected = whole[:, prompt:]
    assert len(expected.unique()) >= 2  # constant text would be equal by chance
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}):
        assert torch.equal(generate_all(model, idx, 2 * T, **options), expected)
    assert list(model.generate(idx, 0)) == []


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, None, None), (2.0, 3, None), (1.0, 10 * V, None), (1.0, None, 0.7), (1.5, 6, 0.5)],
)
def test_frequencies_are_the_probabilities(temperature: float, top_k: int | None, top_p: float | None) -> None:
    model, number = small_gpt(), 20_000
    with torch.no_grad():
        model.transformer.wte.weight.mul_(5)  # makes some characters more likely than others
    idx = random_tokens(1, 2).expand(number, -1)
    logits = model(idx[:1])[0][0, -1] / temperature
    if top_k is not None:
        logits[logits.argsort(descending=True)[top_k:]] = -math.inf
    probs = logits.softmax(-1)
    if top_p is not None:
        selected, total = [], 0.0
        for token in probs.argsort(descending=True).tolist():
            if total < top_p:
                selected.append(token)
                total += probs[token].item()
        assert 1 < len(selected) < (top_k or V)
        probs = torch.zeros(V).index_put((torch.tensor(selected),), probs[selected] / total)
    assert probs.max() < 0.9
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens = generate_all(model, idx, 1, generator=torch.Generator().manual_seed(0), **options)[:, 0]
    found = tokens.bincount(minlength=V) / number
    assert ((found - probs).abs() <= 5 * (probs * (1 - probs) / number).sqrt()).all()


def test_rows_of_a_padded_vocabulary_are_not_sampled() -> None:
    model = small_gpt()
    model.transformer["wte"] = embedding(64, 16)
    tokens = generate_all(model, random_tokens(2, 3), 30, generator=torch.Generator().manual_seed(1))
    assert tokens.max() < V
