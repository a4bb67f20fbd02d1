import math

import pytest
import torch
from torch import nn

from mingpt.config.schema import OptimizerConfig
from mingpt.optim.muon import newton_schulz
from mingpt.optim.optimizer import build_optimizer


def two_blocks() -> nn.Module:
    """Two blocks with matrices of three shapes, tall, wide and square, and an embedding."""
    torch.manual_seed(0)
    model, sizes = nn.Module(), [(6, 9), (9, 6), (6, 6), (6, 9)]
    model.blocks = nn.ModuleDict({i: nn.ModuleList(nn.Linear(*size) for size in sizes) for i in "01"})
    model.wte = nn.Embedding(11, 6)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_equal_those_of_pytorchs_muon_and_adamw(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's Muon has different iterations, so it gets ours, for one matrix at a time."""
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", lambda grad, *_: newton_schulz(grad[None], dtype)[0]
    )
    model, reference = two_blocks(), two_blocks()
    config = OptimizerConfig(name="muon", weight_decay=0.3)
    optimizer = build_optimizer(model, config, dtype)
    hidden = [p for p in reference.blocks.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(hidden, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    vectors = [p for p in reference.parameters() if p.dim() == 1]
    groups = [{"params": [reference.wte.weight], "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=config.betas, fused=True)
    for step, rate in enumerate((1e-2, 3e-2, 2e-2), start=1):
        before = {name: p.detach().clone() for name, p in reference.named_parameters()}
        generator = torch.Generator().manual_seed(step)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator) * 1e-3
            other.grad = mine.grad.clone()
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = rate
        optimizer.step()
        muon.step()
        adamw.step()
        for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            if expected in {*hidden}:
                assert (found - expected).norm() < 1e-5 * (expected - before[name]).norm(), name
            else:
                assert torch.equal(found, expected), name
    assert {id(p) for p in optimizer.state if optimizer.state[p].keys() == {"momentum_buffer"}} == {
        id(p) for p in model.blocks.parameters() if p.dim() == 2
    }


@pytest.mark.parametrize("sizes", [(3, 8, 20), (3, 20, 8), (1, 8, 8), (0, 8, 8)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_newton_schulz_keeps_singular_vectors_and_zero_and_equalizes_singular_values_then_norms(
    sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    gradients = torch.randn(sizes, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = newton_schulz(gradients, dtype).double()
    left, values, right = torch.linalg.svd(gradients.double(), full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True) / 1.02
    for a, b, c in ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061)):
        values = a * values + b * values**3 + c * values**5
    assert ((values > 0.15) & (values < 1.9)).all()
    expected = left @ torch.diag_embed(values) @ right
    dim = 2 if sizes[1] >= sizes[2] else 1
    expected = expected / expected.norm(dim=dim, keepdim=True)
    assert (found / found.norm(dim=dim, keepdim=True) - expected).norm() <= tolerance * expected.norm()
    assert found.shape == sizes
    norm = math.sqrt(min(sizes[1:]) / max(sizes[1:]))  # each row's or column's; 1 in a square matrix
    assert torch.allclose(found.norm(dim=dim), torch.tensor(norm, dtype=found.dtype))
    zeros = torch.zeros(sizes)
    assert torch.equal(newton_schulz(zeros, dtype), zeros)
