from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mingpt.nn.layers import Dropout, LayerNorm, ReLUSquared, bmm_attention, rms_norm

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_layer_norm_returns_the_dtype_of_its_input() -> None:
    x = torch.randn(2, 5, 8)
    norm = LayerNorm(8).bfloat16()
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x), F.layer_norm(x, (8,)))


@pytest.mark.parametrize(
    ("function", "reference"),
    [(rms_norm, lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6)), (ReLUSquared(), lambda x: F.relu(x).square())],
)
def test_values_and_gradients_are_those_of_pytorch_and_second_derivatives_are_right(
    function: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor]
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        found, expected = function(x), reference(x)
        assert found.dtype == dtype
        assert torch.allclose(found, expected, rtol=0, atol=tolerance)
        gradient = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
        found, expected = (torch.autograd.grad(y, x, gradient)[0] for y in (found, expected))
        assert torch.allclose(found, expected, rtol=0, atol=tolerance)
    assert torch.autograd.gradgradcheck(function, gradient[0].double().requires_grad_())
