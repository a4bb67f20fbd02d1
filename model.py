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
    rms_norm,
)

Rotary = tuple[Tensor, Tensor]  # factors of rotate() at each position, (T, 2H, D) each; D = C/H


class KVCache:
    """The state of generation: keys and values of all tokens so far, and recent inputs of convolutions.

    Args:
        size: maximum number of tokens
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.length = 0  # tokens so far; only these positions of `keys_values` are valid
        self.block = 0  # number of the block that is called; several numbers may have the same layers
        self.keys_values: dict[tuple[int, nn.Module], Tensor] = {}  # of each attention layer, (2, B, H, size, C/H)
        self.recent: dict[tuple[int, nn.Module], Tensor] = {}  # last inputs of convolutions, (B, conv_kernel_size-1, C)

    def extend(self, layer: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of new tokens, (B, H, T, C/H), and returns all, (B, H, length + T, C/H)."""
        key = (self.block, layer)
        if key not in self.keys_values:
            B, H, _, D = keys.shape
            self.keys_values[key] = keys.new_empty(2, B, H, self.size, D)
        end = self.length + keys.size(2)
        cached = self.keys_values[key]
        cached[0, :, :, self.length : end] = keys
        cached[1, :, :, self.length : end] = values
        return cached[0, :, :, :end], cached[1, :, :, :end]


def build_norm(config: GPTConfig) -> nn.Module:
    """Returns a normalization of C channels."""
    return RMSNorm() if config.architecture == "nanochat" else LayerNorm(config.n_embd, bias=config.bias)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates pairs of dimensions of queries and keys, (B, T, 2H, D), by an angle that depends on the position.

    Dimensions i and i + D/2 are a pair: (a, b) becomes (a cos + b sin, b cos - a sin). The factors of all dimensions
    are (cos, cos) and (sin, -sin); rolling x by D/2 exchanges a and b. RoFormer pairs neighboring dimensions and
    rotates in the opposite direction. Only the order of dimensions makes a difference between the two.
    """
    cos, sin = rotary
    return torch.addcmul(x * cos.to(x.dtype), x.roll(x.size(-1) // 2, -1), sin.to(x.dtype))


class CausalConv(nn.Module):
    """A depthwise convolution over the last tokens. Its initial weights make it the identity.

    Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers", 2025.
    """

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        weight = torch.zeros(channels, 1, kernel_size)  # the same shape as the weight of nn.Conv1d
        weight[:, :, -1] = 1
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        B, T, C = x.shape
        past = x.new_zeros(B, self.weight.size(2) - 1, C)
        if cache is not None:
            past = cache.recent.get((cache.block, self), past)
        x = torch.cat((past, x), 1)
        if cache is not None:
            cache.recent[cache.block, self] = x[:, T:]
        # conv2d reads channels in the last dimension without a copy; conv1d does not.
        return F.conv2d(x.mT.unsqueeze(2), self.weight.unsqueeze(2).to(x.dtype), groups=C).squeeze(2).mT


class CausalSelfAttention(nn.Module):
    """Multi-head attention. Each position attends to itself and to earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.has_bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.has_bias)
        self.attn_dropout = Dropout(config.dropout)
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Rotary | None = None, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C); T must be 1 unless the cache is empty."""
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
        is_causal = True
        if cache is not None:
            is_causal = cache.length == 0  # a single new token attends to all cached ones
            k, v = cache.extend(self, k, v)
        y = attention(q, k, v, self.attn_dropout, is_causal)  # (B, H, T, C/H)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    """Two linear layers with ReLU squared or GELU between them (Hendrycks and Gimpel, 2016)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.has_bias)
        self.act = ReLUSquared() if config.architecture == "nanochat" else nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.has_bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a normalization before it and a residual connection.

    With `conv_kernel_size`, a causal convolution follows each normalization.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = build_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = build_norm(config)
        self.mlp = MLP(config)
        size = config.conv_kernel_size
        self.conv_1 = CausalConv(config.n_embd, size) if size else None
        self.conv_2 = CausalConv(config.n_embd, size) if size else None

    def forward(self, x: Tensor, rotary: Rotary | None = None, cache: KVCache | None = None) -> Tensor:
        h = self.ln_1(x)
        if self.conv_1 is not None:
            h = self.conv_1(h, cache)
        x = x + self.attn(h, rotary, cache)
        h = self.ln_2(x)
        if self.conv_2 is not None:
            h = self.conv_2(h, cache)
        return x + self.mlp(h)


class GPT(nn.Module):
    """Predicts the next token at each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.is_nanochat = config.architecture == "nanochat"
        modules = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": Dropout(config.dropout),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": build_norm(config),
        }
        self.transformer = nn.ModuleDict(modules)
        projection_std = 0.02 / math.sqrt(2 * config.n_layer)  # 2 n_layer projections add up along the residual path
        if self.is_nanochat:
            del self.transformer["wpe"]  # was built because the weights of a seed depend on the random numbers it draws
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            projection_std = 0.0
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=projection_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The transformer blocks by number; a pipeline stage has some of them, with the same numbers.

        They are the units of sharding, checkpointing and compilation. Several numbers may have the same block.
        """
        return {int(number): block for number, block in self.transformer["h"]._modules.items()}  # type: ignore[misc]

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns logits of the next token at each position, and their mean loss in nats per token.

        Args:
            idx: (B, T) tokens; T is at most block_size
            targets: (B, T) next tokens; positions with IGNORE_INDEX do not count
            cache: keys and values of the tokens before idx; updated in place

        Returns:
            logits (B, T, V), and the mean cross-entropy, or None without targets

        Raises:
            ValueError: there are more tokens than block_size.
        """
        x = self.embed(idx, cache)
        x = self.apply_blocks(x, cache)
        logits = self.unembed(x)
        return logits, None if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token, or 0 if there are no targets.

        Every strategy, pipeline stages included, trains on this loss, and weights it by the micro-batch's targets.

        Args:
            logits: (B, T, V)
            targets: (B, T); positions with IGNORE_INDEX do not count
        """
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        return loss / (targets != IGNORE_INDEX).sum().clamp(min=1)

    def embed(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T) tokens -> (B, T, C)"""
        start = cache.length if cache else 0
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens, but the context window (block_size) is {self.config.block_size}")
        x = self.transformer["wte"](idx)
        if self.is_nanochat:
            x = rms_norm(x)
        else:
            x = x + self.transformer["wpe"](torch.arange(start, end, device=idx.device))
        return self.transformer["drop"](x)

    def apply_blocks(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        rotary = None
        if self.is_nanochat:
            rotary = self.rotary_factors(cache.length if cache else 0, x.size(1), x.device)
        for number, block in self.blocks.items():
            if cache is not None:
                cache.block = number
            x = block(x, rotary, cache)
        if cache is not None:
            cache.length += x.size(1)
        return x

    def rotary_factors(self, start: int, size: int, device: torch.device) -> Rotary:
        """Returns the rotations at `size` positions from `start` on."""
        D = self.config.n_embd // self.config.n_head
        frequencies = ROTARY_BASE ** (-torch.arange(0, D, 2, device=device) / D)
        angles = torch.outer(torch.arange(start, start + size, device=device), frequencies)  # (size, D/2)
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

        Keys and values are cached until the window is full. From then on the window slides, which changes all
        positions, so each token takes a pass over the whole window.

        Args:
            idx: prompts of one length (B, T), on the model's device; only the last block_size tokens are used
            temperature: divisor of the logits; 0 selects the most likely token
            top_k: sample from the k most likely tokens only
            top_p: sample from the fewest tokens whose probabilities add up to this (Holtzman et al., "The Curious
                Case of Neural Text Degeneration", 2020)
        """
        self.eval()
        block_size = self.config.block_size
        window = uncached = idx[:, -block_size:]
        cache = KVCache(block_size)
        for _ in range(max_new_tokens):
            if cache.length == block_size:
                cache = KVCache(block_size)
                uncached = window
            logits, _ = self(uncached, cache=cache)
            tokens = sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
            uncached = tokens[:, None]
            window = torch.cat((window, uncached), 1)[:, -block_size:]
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
