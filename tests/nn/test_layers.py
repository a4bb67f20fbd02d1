import pytest
import torch
import torch.nn.functional as F

from mingpt.nn.layers import Dropout, bmm_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_zeroes_independent_elements_and_keeps_the_mean(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    x = torch.full((403, 1001), 3.0, dtype=dtype)  # an odd number of elements
    y = Dropout(p)(x)
    assert set(y.unique().tolist()) == {0.0, (x[0, 0] * torch.tensor(1 / (1 - p), dtype=dtype)).item()}
    zeroed = (y == 0).double()
    for part in (zeroed, zeroed[:, ::2], zeroed[:, 1::4], zeroed[-100:, -400:]):
        assert part.mean() == pytest.approx(p, abs=0.01)
    both = (zeroed[:, :-1] * zeroed[:, 1:]).mean()
    assert both == pytest.approx(p * p, abs=0.004)  # the four numbers of one draw are independent


def test_bmm_attention_equals_pytorchs_attention_and_its_gradients() -> None:
    q, k, v = torch.randn(3, 2, 3, 70, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    inputs = [part.requires_grad_() for part in (q, k, v)]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = bmm_attention(q, k, v, Dropout(0.0))
    weight = torch.rand_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_found, of_expected = (torch.autograd.grad((y * weight).sum(), inputs) for y in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)
