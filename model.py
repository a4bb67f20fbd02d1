"""What is a GPT? It knows no rank, no device and no optimizer.

GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019) with its parameter names. In shapes,
B is sequences, T characters, C n_embd, H n_head and V vocab_size.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mingpt.config import GPTConfig


class KVCache:
    """Keys and values of the characters a block has seen, so that generating one more need not compute them again.

    Args:
        size: most characters that it will hold
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self.keys: Tensor | None = None  # (B, H, size, C/H), of which the first `seen` characters count
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends those of new characters, (B, H, T, C/H), and returns all, (B, H, seen, C/H)."""
        if self.keys is None or self.values is None:
            B, H, _, D = keys.shape
            self.keys, self.values = keys.new_empty(B, H, self.size, D), values.new_empty(B, H, self.size, D)
        new = slice(self.seen, self.seen + keys.size(2))
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        self.seen = new.stop
        return self.keys[:, :, : new.stop], self.values[:, :, : new.stop]


def use_bmm_attention(q: Tensor, dropout: float) -> bool:
    """Whether two batched products are faster than PyTorch's attention: on CPUs, with dropout or in bf16 (measured)."""
    return q.device.type == "cpu" and (dropout > 0 or (q.dtype == torch.bfloat16 and q.size(2) <= 512))


def bmm_attention(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:
    """Causal attention, (B, H, T, C/H) each -> (B, H, T, C/H)."""
    B, H, T, D = q.shape
    q, k, v = (part.reshape(B * H, T, D) for part in (q, k, v))
    later = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(later.expand(B * H, T, T), q, k.transpose(1, 2), alpha=1 / math.sqrt(D))
    return torch.bmm(dropout(scores.softmax(-1)), v).view(B, H, T, D)


class Dropout(nn.Dropout):
    """Dropout. A CPU draws its random numbers one after another: there, one draw of 64 bits decides on four numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; the share that is zeroed is right to 1/65,536."""
        if not self.training or self.p == 0 or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= min(round(self.p * 2**16), 2**16 - 1) - 2**15
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p))


class CausalSelfAttention(nn.Module):
    """Each character looks at itself and at those before it, never at later ones."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout, self.resid_dropout = Dropout(config.dropout), Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C); with a cache that is not empty, T must be 1."""
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(C, 2)
        )
        causal = True
        if cache is not None:
            causal = cache.seen == 0  # one character after all cached ones may see them all
            k, v = cache.extend(k, v)
        dropout = self.attn_dropout.p if self.training else 0.0
        if causal and use_bmm_attention(q, dropout):
            y = bmm_attention(q, k, v, self.attn_dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)  # (B, H, T, C/H)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    """Each character on its own: four times as wide, GELU (Hendrycks and Gimpel, 2016; GPT-2's tanh form), back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class LayerNorm(nn.LayerNorm):
    """Layer norm in the precision of what comes in, whatever that of its weights is: FSDP hands them over in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """Attention, then MLP, each behind a layer norm and added to what came in.

    Attribute `recompute` says which activations backward computes again instead of keeping them (Chen et al., "Training
    Deep Nets with Sublinear Memory Cost", 2016): none; full: all but the block's input; selective: all but the outputs
    of matrix products, which are dear to compute.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.recompute = "none"
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._forward(x, cache)
        if self.recompute == "full":
            return checkpoint(self._forward, x, use_reentrant=False)
        return checkpoint(self._forward, x, use_reentrant=False, context_fn=_keep_products)

    def _forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
_keep_products = partial(create_selective_checkpoint_contexts, _PRODUCTS)


class Transformer(nn.Module):
    """Embeddings and blocks: what each character has come to mean in the light of those before it.

    Args:
        config: of the whole model
        stage: which of its stages
        stages: how many runs of neighbouring blocks, as equal as can be, it is cut into
    """

    def __init__(self, config: GPTConfig, stage: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        self.drop = Dropout(config.dropout)
        if self.first or self.last:  # the last one's is the output projection
            self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if self.first:
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        numbers = range(config.n_layer * stage // stages, config.n_layer * (stage + 1) // stages)
        self.h = nn.ModuleDict(
            {str(number): Block(config) for number in numbers}
        )  # names stay where others are left out
        if self.last:
            self.ln_f = LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """(B, T) characters, behind the first stage (B, T, C) -> (B, T, C)"""
        if self.first:
            seen = caches[0].seen if caches else 0
            position = torch.arange(seen, seen + x.size(1), device=x.device)
            x = self.drop(self.wte(x) + self.wpe(position))
        for i, block in enumerate(self.h.values()):
            x = block(x, caches[i] if caches else None)
        return self.ln_f(x) if self.last else x


class Stage(nn.Module):
    """Neighbouring blocks of a GPT, with the embeddings where they are the first, and the head where they are the last.

    Parameters have the whole model's names. wte is in the first stage and in the last ("tied").

    Args:
        config: of the whole model
        stage: which one, from 0
        stages: how many there are, at most n_layer
    """

    def __init__(self, config: GPTConfig, stage: int, stages: int) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config, stage, stages)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):  # 2 n_layer of these add up along the residual path
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def blocks(self) -> list[Block]:
        """The parts alike that hold nearly all weights: what is sharded, recomputed and compiled one by one."""
        return list(self.transformer.h.values())  # type: ignore[arg-type]

    def forward(self, x: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """What the stage before has made, (B, T, C), or (B, T) characters -> (B, T, C), or logits (B, T, V)."""
        x = self.transformer(x, caches)
        return F.linear(x, self.transformer.wte.weight) if self.transformer.last else x


class GPT(Stage):
    """Predicts each next character. The output projection is the character embedding, wte, transposed ("tied")."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, 0, 1)

    def forward(  # type: ignore[override]
        self, idx: Tensor, targets: Tensor | None = None, caches: list[KVCache] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits for the character after each position, and their mean loss in nats per character.

        Args:
            idx: (B, T) characters, T at most block_size
            targets: (B, T) the character after each; -1 is left out of the loss
            caches: one for each block, holding what was seen before idx

        Returns:
            logits (B, T, V), and the mean cross-entropy, or None without targets

        Raises:
            ValueError: more characters than block_size.
        """
        T = idx.size(1) + (caches[0].seen if caches else 0)
        if T > self.config.block_size:
            raise ValueError(f"{T} characters, but the model's window (block_size) is {self.config.block_size}")
        logits = super().forward(idx, caches)
        return logits, None if targets is None else cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Loss in nats per character, or with reduction "sum" of all, from logits (B, T, V) and targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)
