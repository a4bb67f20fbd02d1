"""GPT in two architectures, GPT-2 and nanochat, with the same structure and with GPT-2's parameter names.

                       gpt2                                        nanochat
positions              learned, added to the embedding             rotary, in queries and keys
normalization          LayerNorm with weights                      RMSNorm without weights; it is also applied to the
                                                                   embedding and to queries and keys (QK-norm)
activation             GELU                                        ReLU squared
output projections     random, scaled by the depth                 zero at the start
head                   the embedding, transposed (weight tying)    a separate matrix; logits are capped at 15
biases                 with model.bias                             none

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019. nanochat: Karpathy,
https://github.com/karpathy/nanochat, 2025; rotary positions: Su et al., "RoFormer", 2021; RMSNorm: Zhang and Sennrich,
2019; QK-norm: Henry et al., 2020; ReLU squared: So et al., "Primer", 2021; capped logits: Gemma 2, 2024.

Dimensions: B sequences, T tokens, C = n_embd, H = n_head, V = vocab_size.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingpt.config.schema import GPTConfig
from mingpt.nn.layers import (
    IGNORE_INDEX,
    LOGIT_CAP,
    ROTARY_BASE,
    Dropout,
    LayerNorm,
    ReLUSquared,
    RMSNorm,
    attention,
    embedding,
    linear,
    rms_norm,
)

Rotary = tuple[Tensor, Tensor]  # factors of rotate() at each position, (T, 2H, D) each; D = C/H


def build_norm(config: GPTConfig) -> nn.Module:
    """Returns a normalization of C channels."""
    return RMSNorm() if config.architecture == "nanochat" else LayerNorm(config.n_embd, bias=config.bias)


def projection_std(config: GPTConfig) -> float:
    """Returns the initial standard deviation of the output projections of attention and MLP.

    2 n_layer of them add up along the residual path.
    """
    return 0.0 if config.architecture == "nanochat" else 0.02 / math.sqrt(2 * config.n_layer)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates pairs of dimensions of queries and keys, (B, T, 2H, D), by an angle that depends on the position.

    Dimensions i and i + D/2 are a pair: (a, b) becomes (a cos + b sin, b cos - a sin). The factors of all dimensions
    are (cos, cos) and (sin, -sin); rolling x by D/2 exchanges a and b. RoFormer pairs neighboring dimensions and
    rotates in the opposite direction. Only the order of dimensions makes a difference between the two.
    """
    cos, sin = rotary
    return torch.addcmul(x * cos.to(x.dtype), x.roll(x.size(-1) // 2, -1), sin.to(x.dtype))


class CausalSelfAttention(nn.Module):
    """Multi-head attention. Each position attends to itself and to earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = linear(config.n_embd, 3 * config.n_embd, config.has_bias)
        self.c_proj = linear(config.n_embd, config.n_embd, config.has_bias, projection_std(config))
        self.attn_dropout = Dropout(config.dropout)
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        B, T, C = x.shape
        H = self.n_head
        qkv = self.c_attn(x).view(B, T, 3 * H, C // H)
        if rotary is None:
            q, k, v = qkv.chunk(3, dim=2)
        else:  # Rotating queries and keys separately makes a step 3% slower on a CPU.
            qk, v = qkv.split((2 * H, H), dim=2)
            q, k = rms_norm(rotate(qk, rotary)).chunk(2, dim=2)
        q = q.transpose(1, 2)  # (B, H, T, C/H)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        y = attention(q, k, v, self.attn_dropout)  # (B, H, T, C/H)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    """Two linear layers with ReLU squared or GELU between them (Hendrycks and Gimpel, 2016)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = linear(config.n_embd, 4 * config.n_embd, config.has_bias)
        self.act = ReLUSquared() if config.architecture == "nanochat" else nn.GELU(config.gelu_approximate)
        self.c_proj = linear(4 * config.n_embd, config.n_embd, config.has_bias, projection_std(config))
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a normalization before it and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = build_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotary)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Predicts the next token at each position.

    A pipeline stage is a GPT without the parts of other stages, and has the same `forward`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.is_nanochat = config.architecture == "nanochat"
        modules: dict[str, nn.Module] = {"wte": embedding(config.vocab_size, config.n_embd)}
        if not self.is_nanochat:
            modules["wpe"] = embedding(config.block_size, config.n_embd)
        modules["drop"] = Dropout(config.dropout)
        modules["h"] = nn.ModuleDict({str(number): Block(config) for number in range(config.n_layer)})
        modules["ln_f"] = build_norm(config)
        self.transformer = nn.ModuleDict(modules)
        if self.is_nanochat:
            self.lm_head = linear(config.n_embd, config.vocab_size, bias=False)

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The transformer blocks by number; a pipeline stage has some of them, with the same numbers.

        They are the units of sharding, checkpointing and compilation. Several numbers may have the same block.
        """
        return {int(number): block for number, block in self.transformer["h"].items()}  # type: ignore[operator]

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns logits of the next token at each position, and their mean loss in nats per token.

        Args:
            idx: (B, T) tokens; T is at most block_size. A pipeline stage after the first gets the output of the
                stage before it, (B, T, C)
            targets: (B, T) next tokens; positions with IGNORE_INDEX do not count

        Returns:
            logits (B, T, V), and the mean cross-entropy, or None without targets. A pipeline stage before the last
            returns the input of the next stage, (B, T, C), and None

        Raises:
            ValueError: there are more tokens than block_size.
        """
        x = idx if idx.is_floating_point() else self.embed(idx)
        x = self.apply_blocks(x)
        if "ln_f" not in self.transformer:  # not the last stage
            return x, None
        logits = self.unembed(x)
        return logits, None if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token, or 0 if there are no targets.

        Every strategy weights it by the number of targets of the micro-batch.

        Args:
            logits: (B, T, V)
            targets: (B, T); positions with IGNORE_INDEX do not count
        """
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        return loss / (targets != IGNORE_INDEX).sum().clamp(min=1)

    def embed(self, idx: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, C)"""
        T = idx.size(1)
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens, but the context window (block_size) is {self.config.block_size}")
        x = self.transformer["wte"](idx)
        x = rms_norm(x) if self.is_nanochat else x + self.transformer["wpe"](torch.arange(T, device=idx.device))
        return self.transformer["drop"](x)

    def apply_blocks(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        rotary = self.rotary_factors(x.size(1), x.device) if self.is_nanochat else None
        for block in self.blocks.values():
            x = block(x, rotary)
        return x

    def rotary_factors(self, T: int, device: torch.device) -> Rotary:
        """Returns the rotations at the positions of a window."""
        D = self.config.n_embd // self.config.n_head
        frequencies = ROTARY_BASE ** (-torch.arange(0, D, 2, device=device) / D)
        angles = torch.outer(torch.arange(T, device=device), frequencies)  # (T, D/2)
        cos = angles.cos()
        sin = angles.sin()
        # The factors are repeated for all heads, because broadcasting takes 14 to 25% longer on a CPU.
        heads = 2 * self.config.n_head
        cos = torch.cat((cos, cos), 1)[:, None].repeat(1, heads, 1)
        sin = torch.cat((sin, -sin), 1)[:, None].repeat(1, heads, 1)
        return cos, sin

    def unembed(self, x: Tensor) -> Tensor:
        """(B, T, C) -> logits (B, T, V)"""
        x = self.transformer["ln_f"](x)
        if self.is_nanochat:
            return LOGIT_CAP * torch.tanh(self.lm_head(x).to(x.dtype) / LOGIT_CAP)  # autocast multiplies in bf16
        return F.linear(x, self.transformer["wte"].weight)  # type: ignore[arg-type]

    @torch.no_grad()  # not inference_mode, because FSDP does not accept its tensors; callers without FSDP may enter it
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yields the next tokens (B,), one position at a time. Leaves the model in eval mode.

        Each token takes a pass over the window, the last block_size tokens.

        Args:
            idx: prompts of one length (B, T), on the model's device; only the last block_size tokens are used
            temperature: divisor of the logits; 0 selects the most likely token
            top_k: sample from the k most likely tokens only
            top_p: sample from the fewest tokens whose probabilities add up to this (Holtzman et al., "The Curious
                Case of Neural Text Degeneration", 2020)
        """
        self.eval()
        for _ in range(max_new_tokens):
            idx = idx[:, -self.config.block_size :]
            logits, _ = self(idx)
            logits = logits[:, -1, : self.config.vocab_size].float()  # a padded vocabulary has more rows than tokens
            tokens = sample(logits, temperature, top_k, top_p, generator)
            idx = torch.cat((idx, tokens[:, None]), 1)
            yield tokens

    def flops_per_token(self) -> int:
        """Returns the floating-point operations of forward and backward per token of a full window.

        These are 6 per weight in a matrix product, and 12 n_layer n_embd T for attention, including the masked half
        (Chowdhery et al., "PaLM", 2022, appendix B).
        """
        config = self.config
        weights = sum(parameter.numel() for parameter in self.transformer["h"].parameters() if parameter.dim() > 1)
        weights += config.vocab_size * config.n_embd  # the head
        return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Samples tokens (B,) from logits (B, V)."""
    if temperature < 1e-30:  # the quotients would overflow
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        sorted_probs, order = probs.sort(descending=True)
        preceding = sorted_probs.cumsum(-1) - sorted_probs  # 0 for the most likely token, which is always kept
        probs = probs.masked_fill((preceding >= max(top_p, 1e-30)).gather(-1, order.argsort(-1)), 0.0)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]
