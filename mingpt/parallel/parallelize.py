"""Activation checkpointing, compilation and pipeline stages, applied to a model from outside."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mingpt.config import GPTConfig

MATRIX_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def apply_activation_checkpointing(model: nn.Module, mode: str) -> None:
    """Makes backward recompute activations of the blocks.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. This replaces `forward` of each block, since
    torch's checkpoint_wrapper would change the names of the parameters.

    Args:
        model: has `blocks`
        mode: none; full: keep only the input of each block; selective: keep the outputs of matrix products as well
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, MATRIX_PRODUCTS)
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    def checkpointed(*args: Any) -> Tensor:
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return checkpointed


def apply_compile(model: nn.Module) -> None:
    """Compiles each block with torch.compile, once per shape of a batch."""
    torch._dynamo.config.optimize_ddp = False  # it splits graphs at DDP's buckets; each block is a graph already
    torch._dynamo.config.recompile_limit = 64  # uneven shares, short last batches and evaluation have their own shapes
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False)


class GPTStage(nn.Module):
    """Consecutive blocks of a GPT, with the embeddings in the first stage and the output projection in the last.

    Blocks are distributed evenly. Modules are those of the GPT, and parameters have the same names.
    """

    def __init__(self, gpt: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.config, self.is_first, self.is_last = gpt.config, stage == 0, stage == stages - 1
        first, end = (len(gpt.blocks) * i // stages for i in (stage, stage + 1))
        modules: dict[str, nn.Module] = dict(gpt.transformer)
        modules["h"] = nn.ModuleDict({str(i): gpt.blocks[i] for i in range(first, end)})
        has_head = hasattr(gpt, "lm_head")
        unused = set() if self.is_first else {"wpe", "drop"}
        unused |= set() if self.is_last else {"ln_f"}
        unused |= set() if self.is_first or (self.is_last and not has_head) else {"wte"}
        self.transformer = nn.ModuleDict({name: module for name, module in modules.items() if name not in unused})
        if self.is_last and has_head:
            self.lm_head = gpt.lm_head
        self.embed, self.unembed, self.new_kv_caches = gpt.embed, gpt.unembed, gpt.new_kv_caches

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.transformer["h"].children())

    def forward(self, x: Tensor, caches: list[Any] | None = None) -> Tensor:
        """(B, T) characters in the first stage, else (B, T, C) -> logits (B, T, V) in the last stage, else (B, T, C)"""
        if self.is_first:
            x = self.embed(x, caches[0].length if caches else 0)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.unembed(x) if self.is_last else x


def split_into_stages(gpt: nn.Module, stages: int) -> list[GPTStage]:
    """The pipeline stages of a GPT."""
    return [GPTStage(gpt, stage, stages) for stage in range(stages)]


def meta_stages(model: Any, stages: int = 1) -> list[GPTStage]:
    """The stages of a model like this one, on the meta device. Not to be modified: they are cached."""
    return _meta_stages(type(model), model.config, stages)  # type: ignore[arg-type]


@lru_cache
def _meta_stages(model_class: type[nn.Module], model_config: GPTConfig, stages: int) -> list[GPTStage]:
    with torch.device("meta"):
        return split_into_stages(model_class(model_config), stages)
