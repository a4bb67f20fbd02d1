"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019), with its parameter names.

Dimensions: B sequences, T tokens, C = n_embd, H = n_head, V = vocab_size.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingpt.config.schema import GPTConfig
from mingpt.nn.layers import IGNORE_INDEX, Dropout, LayerNorm, attention, embedding, linear


class CausalSelfAttention(nn.Module):
    """Multi-head attention. Each position attends to itself and to earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = linear(config.n_embd, 3 * config.n_embd, config.bias)
        self.c_proj = linear(config.n_embd, config.n_embd, config.bias, 0.02 / math.sqrt(2 * config.n_layer))
        self.attn_dropout = Dropout(config.dropout)
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3 * self.n_head, -1).chunk(3, dim=2)  # (B, T, H, C/H)
        q = q.transpose(1, 2)  # (B, H, T, C/H)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        y = attention(q, k, v, self.attn_dropout)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    """Two linear layers with GELU between them (Hendrycks and Gimpel, 2016)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = linear(config.n_embd, 4 * config.n_embd, config.bias)
        self.act = nn.GELU(config.gelu_approximate)
        # 2 n_layer output projections add up along the residual path.
        self.c_proj = linear(4 * config.n_embd, config.n_embd, config.bias, 0.02 / math.sqrt(2 * config.n_layer))
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a layer norm before it and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model. The embedding, transposed, is also the head (weight tying).

    A pipeline stage is a GPT without the parts of other stages, and has the same `forward`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": embedding(config.vocab_size, config.n_embd),
                "wpe": embedding(config.block_size, config.n_embd),
                "drop": Dropout(config.dropout),
                "h": nn.ModuleDict({str(number): Block(config) for number in range(config.n_layer)}),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias),
            }
        )

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
        for block in self.blocks.values():
            x = block(x)
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
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(T, device=idx.device))
        return self.transformer["drop"](x)

    def unembed(self, x: Tensor) -> Tensor:
        """(B, T, C) -> logits (B, T, V)"""
        return F.linear(self.transformer["ln_f"](x), self.transformer["wte"].weight)  # type: ignore[arg-type]

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
