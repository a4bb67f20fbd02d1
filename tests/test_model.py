"""Causality, an entropy that nobody may beat, GPT-2's names and start, the loss, dropout, and the cache."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import T, V, random_gpt, random_tokens, small_gpt
from torch import Tensor

from mingpt.config import GPTConfig, ModelConfig, OptimizerConfig
from mingpt.optimizer import build_optimizer, learning_rate
from model import GPT, Dropout, KVCache, Stage, bmm_attention, use_bmm_attention

pytestmark = pytest.mark.usefixtures("one_thread")


# Causality.


def test_changing_later_characters_changes_no_earlier_logit() -> None:
    length = 40
    model = small_gpt(block_size=length)
    base = random_tokens(length).expand(length, -1)
    position = torch.arange(length)
    alone = torch.where(position == position[:, None], (base + 1) % V, base)  # row t: only character t is another
    changed = torch.where(position >= position[:, None], (base + 3) % V, base)  # row t: all from t on are others
    before = model(base)[0]
    for others in (alone, changed):
        after = model(others)[0]
        for t in range(length):
            assert torch.equal(after[t, :t], before[t, :t])
            assert (after[t, t:] != before[t, t:]).any(-1).all()


def test_no_gradient_flows_from_a_logit_to_a_later_character() -> None:
    model, embedded = small_gpt(), []
    model.transformer.drop.register_forward_hook(lambda module, args, output: embedded.append(output))
    logits, _ = model(random_tokens(1, T))
    for t in range(T):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embedded[0], retain_graph=True)  # (1, T, C)
        assert not gradient[0, t + 1 :].any()
        assert gradient[0, : t + 1].any(-1).all()


STEPS = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8], dtype=torch.float64)  # chance of going 0, 1, 2 or 3 letters on
ENTROPY = 1.75 * math.log(2)  # nats per character, by construction
LETTERS = 8


def random_walk(length: int, seed: int) -> Tensor:
    """A text in which each letter is the one before plus a random step, modulo 8: no one can know the step before."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(STEPS, length, replacement=True, generator=generator).cumsum(0) % LETTERS


def test_held_out_loss_approaches_the_entropy_of_the_source_and_never_beats_it() -> None:
    window, batch, steps = 16, 32, 150
    model = small_gpt(n_embd=32, vocab_size=LETTERS, block_size=window)
    config = OptimizerConfig(name="adamw", learning_rate=1e-2, warmup_steps=10)
    optimizer = build_optimizer(model, config)
    for step, text in enumerate(random_walk(steps * batch * (window + 1), seed=1).view(steps, batch, -1), start=1):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = learning_rate(step, steps, config)
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:])[1].backward()
        optimizer.step()
    text = random_walk(2000 * window + 1, seed=2)
    idx, targets = text[:-1].view(-1, window), text[1:].view(-1, window)
    with torch.no_grad():
        loss = model(idx, targets)[1].item()

    # What the source itself would score on this text. Its steps are independent, so the law of large numbers holds.
    surprise = -STEPS[(targets - idx) % LETTERS].log()
    assert abs(surprise.mean() - ENTROPY) < 6 * surprise.std() / surprise.numel() ** 0.5
    # Who bets against the source with the past alone multiplies a stake by 1e9 with chance 1e-9 at most (Ville's
    # inequality for the likelihood ratio), however good the guesses. On 32,000 letters that is 0.0006 nats for each.
    luck = math.log(1e9) / targets.numel()
    assert surprise.mean() - luck < loss < surprise.mean() + 0.05


# Names, sizes and first values.

BLOCK = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_have_the_names_of_gpt_2(bias: bool) -> None:
    layers = [f"h.{i}.{name}" for i in range(2) for name in BLOCK] + ["ln_f"]
    expected = {"transformer.wte.weight", "transformer.wpe.weight"} | {f"transformer.{name}.weight" for name in layers}
    if bias:
        expected |= {f"transformer.{name}.bias" for name in layers}
    model = small_gpt(bias=bias)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} == expected


def test_the_default_model_has_809856_parameters() -> None:
    model = GPT(GPTConfig(vocab_size=65, block_size=64))
    assert sum(parameter.numel() for parameter in model.parameters()) == 809_856


def test_weights_start_as_those_of_gpt_2() -> None:
    model = small_gpt(n_layer=3, n_embd=128, vocab_size=65, block_size=64)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 3) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 6 * std / parameter.numel() ** 0.5, name


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_layer", 0), ("n_head", 0), ("n_embd", 0), ("n_embd", 126), ("n_head", 3)]
    + [("dropout", value) for value in (-0.1, 1.0, math.nan)],
)
def test_bad_shapes_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"model\.{key}.* {value}\b"):
        ModelConfig(**{key: value})


# The loss.


def test_logits_and_loss() -> None:
    model, idx, targets = random_gpt(), random_tokens(3, 5), random_tokens(3, 5, seed=2)
    logits, loss = model(idx, targets)
    assert logits.shape == (3, 5, V)
    assert model(idx)[1] is None
    assert torch.equal(model(idx)[0], logits)
    by_hand = [-logits[b, t].softmax(-1)[targets[b, t]].log() for b in range(3) for t in range(5)]
    assert loss.item() == pytest.approx(sum(by_hand).item() / 15, rel=1e-12)
    assert torch.equal(loss, F.cross_entropy(logits.reshape(15, V), targets.reshape(15)))


def test_logits_equal_those_of_gpt_2_by_hand() -> None:
    model, idx = random_gpt(), random_tokens(1, T)
    weights = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = weights["wte.weight"][idx[0]] + weights["wpe.weight"]  # (T, C)
    for i in range(2):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(16, 1)
        heads = []
        for head in (slice(0, 8), slice(8, 16)):
            score = (q[:, head] @ k[:, head].T / math.sqrt(8)).masked_fill(torch.ones(T, T).triu(1) == 1, -math.inf)
            heads.append(score.softmax(1) @ v[:, head])
        x = x + linear(torch.cat(heads, 1), f"h.{i}.attn.c_proj")
        hidden = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        hidden = hidden / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + linear(hidden, f"h.{i}.mlp.c_proj")
    assert torch.allclose(model(idx)[0][0], norm(x, "ln_f") @ weights["wte.weight"].T, rtol=0, atol=1e-10)


def test_a_fresh_model_knows_nothing() -> None:
    model = small_gpt(n_embd=128, vocab_size=65, block_size=64)
    _, loss = model(random_tokens(16, 64, vocab_size=65), random_tokens(16, 64, seed=2, vocab_size=65))
    assert loss.item() == pytest.approx(math.log(65), abs=0.2)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_are_the_model_in_pieces(stages: int) -> None:
    """Each weight in one of them, wte in the first and the last; as equal as five blocks can be dealt out."""
    model = GPT(GPTConfig(n_layer=5, n_head=2, n_embd=16, vocab_size=7, block_size=8)).eval()
    weights, idx = model.state_dict(), torch.randint(7, (3, 8))
    pieces = [Stage(model.config, stage, stages).eval() for stage in range(stages)]
    x, names = idx, []
    for piece in pieces:
        piece.load_state_dict({name: weights[name] for name in piece.state_dict()})
        names += list(piece.state_dict())
        x = piece(x)
    assert torch.equal(x, model(idx)[0])
    assert sorted(names) == sorted([*weights, *["transformer.wte.weight"] * (stages > 1)])
    blocks = [len(piece.blocks) for piece in pieces]
    assert max(blocks) - min(blocks) <= 1
    with torch.no_grad():
        caches = [[KVCache(8) for _ in piece.blocks] for piece in pieces]
        for part in idx.split([6, 1, 1], 1):
            x = part
            for piece, its in zip(pieces, caches, strict=True):
                x = piece(x, its)
    assert torch.allclose(x, model(idx)[0][:, -1:], atol=1e-6)


def test_targets_of_minus_one_are_left_out_of_the_mean() -> None:
    model, idx, targets = random_gpt(), random_tokens(2, T), random_tokens(2, T, seed=2)
    hidden = targets.clone()
    hidden[0, :3] = hidden[1, 6] = -1
    logits, loss = model(idx, hidden)
    kept = hidden != -1
    assert torch.allclose(loss, F.cross_entropy(logits[kept], targets[kept]))
    assert not torch.allclose(loss, model(idx, targets)[1])


def test_more_characters_than_the_window_are_refused() -> None:
    model = small_gpt()
    model(random_tokens(1, T))
    with pytest.raises(ValueError, match=f"{T + 1} characters.*{T}"):
        model(random_tokens(1, T + 1))


# Dropout.


def test_dropout_is_random_in_training_repeats_with_its_seed_and_rests_in_eval() -> None:
    model, idx, targets = small_gpt(dropout=0.3), random_tokens(4, T), random_tokens(4, T, seed=2)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return model(idx, targets)[1].item()

    assert loss(1) == loss(1) != loss(2)
    model.eval()
    without = small_gpt(dropout=0.0)(idx, targets)[1].item()  # in training mode, same weights
    assert loss(1) == loss(2) == without


@pytest.mark.parametrize("place", ["drop", "h.1.attn.attn_dropout", "h.1.attn.resid_dropout", "h.1.mlp.dropout"])
def test_dropout_falls_on_embeddings_attention_and_both_branches(place: str) -> None:
    model, idx = small_gpt(dropout=0.0), random_tokens(2, T)
    still = model(idx)[0]
    module = model.transformer.get_submodule(place)
    module.p = 0.5
    assert not torch.equal(model(idx)[0], still)
    assert torch.equal(model.eval()(idx)[0], still)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_zeroes_its_share_wherever_it_is_and_keeps_the_mean(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    x = torch.full((403, 1001), 3.0, dtype=dtype)  # an odd number of elements
    y = Dropout(p)(x)
    assert set(y.unique().tolist()) == {0.0, (x[0, 0] * torch.tensor(1 / (1 - p), dtype=dtype)).item()}
    zeroed = (y == 0).double()
    for part in (zeroed, zeroed[:, ::2], zeroed[:, 1::4], zeroed[-100:, -400:]):
        assert part.mean() == pytest.approx(p, abs=0.01)
    neighbours = (zeroed[:, :-1] * zeroed[:, 1:]).mean()
    assert neighbours == pytest.approx(p * p, abs=0.004)  # one draw's four numbers know nothing of each other


@pytest.mark.parametrize(("p", "share"), [(1e-7, 0.0), (0.999999, 1.0)])
def test_dropout_at_its_ends(p: float, share: float) -> None:
    torch.manual_seed(0)
    assert (Dropout(p)(torch.ones(1000, 1000)) == 0).double().mean() == pytest.approx(share, abs=1e-4)


# Attention.


def test_attention_in_products_is_pytorchs_attention() -> None:
    q, k, v = torch.randn(3, 2, 3, 70, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    parts = [part.requires_grad_() for part in (q, k, v)]
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours = bmm_attention(q, k, v, Dropout(0.0))
    weight = torch.rand_like(theirs)
    for one, other in zip(
        (theirs, *torch.autograd.grad((theirs * weight).sum(), parts)),
        (ours, *torch.autograd.grad((ours * weight).sum(), parts)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_which_attention_is_a_rule_on_device_precision_window_and_dropout() -> None:
    def q(T: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        return torch.empty(1, 1, T, 8, dtype=dtype, device=device)

    assert use_bmm_attention(q(512, torch.bfloat16), dropout=0.0)
    assert use_bmm_attention(q(2048, torch.float32), dropout=0.1)
    assert not use_bmm_attention(q(513, torch.bfloat16), dropout=0.0)
    assert not use_bmm_attention(q(64, torch.float32), dropout=0.0)
    assert not use_bmm_attention(q(64, torch.bfloat16, "meta"), dropout=0.1)


def test_in_bf16_no_later_character_is_seen_either() -> None:
    model, base = small_gpt(block_size=40), random_tokens(1, 40)
    with torch.autocast("cpu", torch.bfloat16):
        before, after = model(base)[0], model(torch.cat((base[:, :20], (base[:, 20:] + 1) % V), 1))[0]
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_logits_from_a_cache_equal_those_of_one_pass() -> None:
    model, idx = random_gpt(), random_tokens(3, T)
    caches = [KVCache(T), KVCache(T)]
    parts = [model(part, caches=caches)[0] for part in idx.split([3, 1, 1, 1, 1, 1], 1)]
    assert torch.allclose(torch.cat(parts, 1), model(idx)[0], rtol=0, atol=1e-10)
    assert [cache.seen for cache in caches] == [T, T]
    with pytest.raises(ValueError, match=f"{T + 1} characters"):
        model(idx[:, :1], caches=caches)
