"""Activation checkpointing of a model, without changes of its code."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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
    """Makes backward recompute the activations of each block.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. This function replaces the `forward` of each
    block, since PyTorch's checkpoint_wrapper would change the names of parameters.

    Args:
        model: a model with `blocks`
        mode: none; full: keep only the input of each block; selective: also keep the outputs of matrix products
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, MATRIX_PRODUCTS)
    for block in dict.fromkeys(model.blocks.values()):  # type: ignore[operator]
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    def checkpointed(*args: Any) -> Tensor:
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return checkpointed
