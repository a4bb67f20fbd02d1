import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mingpt.config.schema import GPTConfig, OptimizerConfig
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.optim.optimizer import build_optimizer, learning_rate
from model import MLP
from tests.inside import T, V, random_gpt, random_tokens, small_gpt


def test_no_logit_depends_on_a_later_character() -> None:
    length = 40
    model = small_gpt(block_size=length)
    base = random_tokens(length).expand(length, -1)
    position = torch.arange(length)
    one_changed = torch.where(position == position[:, None], (base + 1) % V, base)  # row t: character t differs
    all_changed = torch.where(position >= position[:, None], (base + 3) % V, base)  # row t: characters from t differ
    before = model(base)[0]
    for changed in (one_changed, all_changed):
        differs = (model(changed)[0] != before).any(-1)
        assert torch.equal(differs, position >= position[:, None])
    with torch.autocast("cpu", torch.bfloat16):  # other kernels
        before, after = model(base)[0], model(all_changed)[0]
    assert torch.equal(after[20, :20], before[20, :20])
    assert not torch.equal(after[20, 20:], before[20, 20:])


STEPS = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8], dtype=torch.float64)  # probabilities of steps by 0 to 3 letters
LETTERS = 8


def random_walk(length: int, seed: int) -> Tensor:
    """Returns a text. Each letter is the previous letter plus an independent random step, modulo 8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(STEPS, length, replacement=True, generator=generator).cumsum(0) % LETTERS


def test_held_out_loss_approaches_the_entropy_of_the_source_and_is_not_below_it() -> None:
    window, batch, steps = 16, 32, 150
    model = small_gpt(n_embd=32, vocab_size=LETTERS, block_size=window)
    config = OptimizerConfig(name="adamw", learning_rate=1e-2, warmup_steps=10)
    optimizer = build_optimizer(model, config)
    for step, text in enumerate(random_walk(steps * batch * (window + 1), seed=1).view(steps, batch, -1), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, config)
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:])[1].backward()
        optimizer.step()
    text = random_walk(2000 * window + 1, seed=2)
    idx, targets = text[:-1].view(-1, window), text[1:].view(-1, window)
    with torch.no_grad():
        loss = model(idx, targets)[1].item()

    # The loss of the source on this text is near its entropy of 1.75 bits, because steps are independent.
    source_loss = -STEPS[(targets - idx) % LETTERS].log()
    assert abs(source_loss.mean() - 1.75 * math.log(2)) < 6 * source_loss.std() / source_loss.numel() ** 0.5
    # The likelihood ratio of any causal prediction to the source exceeds 1e9 with a probability of at most 1e-9
    # (Ville's inequality). On 32,000 letters, this is 0.0006 nats per letter.
    margin = math.log(1e9) / targets.numel()
    assert source_loss.mean() - margin < loss < source_loss.mean() + 0.05


def test_initial_weights_are_distributed_as_in_gpt_2() -> None:
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
    _, loss = model(random_tokens(16, 64, vocab_size=65), random_tokens(16, 64, seed=2, vocab_size=65))
    assert loss.item() == pytest.approx(math.log(65), abs=0.2)  # the loss of a uniform distribution


def test_initial_values_of_a_changed_model_are_those_of_its_constructors(monkeypatch: pytest.MonkeyPatch) -> None:
    init: Any = MLP.__init__

    def changed(self: Any, config: GPTConfig) -> None:
        init(self, config)
        self.mix = nn.Parameter(torch.eye(16))
        self.gate = nn.Linear(16, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.ones_(self.gate.bias)

    monkeypatch.setattr(MLP, "__init__", changed)
    for block in small_gpt().blocks.values():
        values = block.mlp.mix, block.mlp.gate.weight, block.mlp.gate.bias
        assert all(map(torch.equal, values, (torch.eye(16), torch.zeros(1, 16), torch.ones(1))))


def test_loss_is_the_mean_over_targets_and_leaves_out_ignore_index() -> None:
    model, idx, targets = random_gpt(), random_tokens(3, 5), random_tokens(3, 5, seed=2)
    logits, loss = model(idx, targets)
    assert logits.shape == (3, 5, V)
    assert model(idx)[1] is None
    assert torch.equal(model(idx)[0], logits)
    terms = [-logits[b, t].softmax(-1)[targets[b, t]].log() for b in range(3) for t in range(5)]
    assert loss.item() == pytest.approx(sum(terms).item() / 15, rel=1e-12)
    ignored = targets.clone()
    ignored[0, :3] = ignored[1, 4] = IGNORE_INDEX
    kept = ignored != IGNORE_INDEX
    assert torch.allclose(model(idx, ignored)[1], F.cross_entropy(logits[kept], targets[kept]))
    none = model(idx, torch.full_like(targets, IGNORE_INDEX))[1]
    assert none == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(none, list(model.parameters())))


@pytest.mark.parametrize("name", ["drop", "h.1.attn.attn_dropout", "h.1.attn.resid_dropout", "h.1.mlp.dropout"])
def test_dropout_applies_to_embeddings_attention_and_both_branches(name: str) -> None:
    model, idx = small_gpt(dropout=0.0), random_tokens(2, T)
    without = model(idx)[0]
    model.transformer.get_submodule(name).p = 0.5
    assert not torch.equal(model(idx)[0], without)
    assert torch.equal(model.eval()(idx)[0], without)


def test_flops_are_those_that_pytorch_counts() -> None:
    model, idx = small_gpt(), random_tokens(1, T)
    # With fused attention kernels, the scores that backward recomputes would be counted twice.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, loss = model(idx, idx)
        torch.autograd.grad(loss, list(model.parameters()))
    assert T * model.flops_per_token() == counter.get_total_flops()
