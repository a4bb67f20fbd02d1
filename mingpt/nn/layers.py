"""Initial weights, layer norm, and dropout and attention in forms that are faster on CPUs."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -1  # target of a position without a next token


def linear(in_features: int, out_features: int, bias: bool, std: float = 0.02) -> nn.Linear:
    """Returns a linear layer with GPT-2's initial values: weights from N(0, std), biases zero."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def embedding(num_embeddings: int, embedding_dim: int) -> nn.Embedding:
    """Returns an embedding with GPT-2's initial values, from N(0, 0.02)."""
    layer = nn.Embedding(num_embeddings, embedding_dim)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Dropout(nn.Dropout):
    """Dropout that draws 64 random bits for four elements on CPUs, because their generator is sequential.

    The probability is rounded to a multiple of 1/65,536.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if not _is_eager_on_cpu(x):
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= round(self.p * 2**16) - 2**15
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p))


class LayerNorm(nn.LayerNorm):
    """Layer norm in the dtype of its input, for weights of any dtype, since FSDP provides them in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def _is_eager_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:
    """Applies causal attention to queries, keys and values (B, H, T, D), with the faster of two methods."""
    p = dropout.p if dropout.training else 0.0
    if use_bmm_attention(q, p):
        return bmm_attention(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


def use_bmm_attention(q: Tensor, dropout: float) -> bool:
    """Returns whether `bmm_attention` is faster than PyTorch's kernel for queries (B, H, T, D), as measured."""
    is_faster = dropout > 0 or (q.dtype == torch.bfloat16 and q.size(2) <= 512)
    return is_faster and q.device.type == "cpu"


def bmm_attention(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:
    """Applies causal attention as two batched matrix products: (B, H, T, D) each -> (B, H, T, D)."""
    B, H, T, D = q.shape
    q = q.reshape(B * H, T, D)
    k = k.reshape(B * H, T, D)
    v = v.reshape(B * H, T, D)
    mask = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(mask.expand(B * H, T, T), q, k.transpose(1, 2), alpha=1 / math.sqrt(D))
    return torch.bmm(dropout(scores.softmax(-1)), v).view(B, H, T, D)
