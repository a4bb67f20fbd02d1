"""Faster forms of PyTorch's layers on CPUs, and a layer norm that takes weights of any dtype."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """Dropout that draws 64 random bits for four elements on CPUs, whose generator is sequential.

    The dropped fraction is exact to 1/65,536.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= min(round(self.p * 2**16), 2**16 - 1) - 2**15
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p))


class LayerNorm(nn.LayerNorm):
    """Layer norm in the dtype of its input: FSDP provides the weights in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def use_bmm_attention(q: Tensor, dropout: float) -> bool:
    """Whether `bmm_attention` is faster than PyTorch's kernel: on CPUs, with dropout or in bf16 (measured)."""
    return q.device.type == "cpu" and (dropout > 0 or (q.dtype == torch.bfloat16 and q.size(2) <= 512))


def bmm_attention(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:
    """Causal attention as two batched matrix products: (B, H, T, D) each -> (B, H, T, D)."""
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    mask = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(mask.expand(B * H, T, T), q, k.transpose(1, 2), alpha=1 / math.sqrt(D))
    return torch.bmm(dropout(scores.softmax(-1)), v).view(B, H, T, D)
