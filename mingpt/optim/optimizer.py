"""Parameter groups, the optimizer, and the learning-rate schedule as a pure function of the step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mingpt.config.schema import OptimizerConfig
from mingpt.optim.muon import AdamW, MuonWithAdamW


def learning_rate(step: int, last_step: int, config: OptimizerConfig) -> float:
    """Returns the learning rate of a step: linear warm-up, linear decay, then the minimum.

    Linear decay to zero works better than a cosine: Defazio et al., "Optimal Linear Decay Learning Rate Schedules and
    Further Refinements", 2023; Bergsma et al., "Straight to Zero", 2025.

    Args:
        step: number of the step, from 1
        last_step: end of the decay if `config.decay_steps` is null
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    end = config.decay_steps or last_step
    if step >= end:
        return config.min_learning_rate
    progress = (step - config.warmup_steps) / (end - config.warmup_steps)
    return config.learning_rate + progress * (config.min_learning_rate - config.learning_rate)


def param_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Returns three groups: the blocks' linear layers (for Muon), other matrices, and the rest, without weight decay.

    A group may be empty. For example, a middle stage of a pipeline may have only the matrices of blocks. Frozen
    parameters (requires_grad is False) are not in any group. The learning rate of a group is the step's, times its
    `lr_scale` if it has one.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2]
    blocks: Any = model.blocks if config.name == "muon" else {}
    layers = [module for block in blocks.values() for module in block.modules() if isinstance(module, nn.Linear)]
    hidden = {layer.weight for layer in layers}
    return [
        {"params": [p for p in matrices if p in hidden], "weight_decay": config.weight_decay, "muon": True},
        {"params": [p for p in matrices if p not in hidden], "weight_decay": config.weight_decay, "muon": False},
        {"params": [p for p in trained if p.dim() != 2], "weight_decay": 0.0, "muon": False},
    ]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    ns_dtype: torch.dtype = torch.float32,
    wrapper: Callable[..., Optimizer] | None = None,
) -> Optimizer:
    """Returns fused AdamW (Loshchilov and Hutter, 2019), or Muon with AdamW.

    Args:
        ns_dtype: dtype of Muon's matrix products
        wrapper: builds an optimizer from groups, class and settings, like ZeroRedundancyOptimizer
    """
    groups = param_groups(model, config)
    if any("lr" in group for group in groups):
        raise ValueError("a parameter group has lr, which each step would overwrite; use lr_scale, a factor")
    # With fsdp, parameters are DTensors. PyTorch 2.13 has fused AdamW for DTensors, but not fused SGD.
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "fused": True}
    cls: type[Optimizer] = AdamW
    if config.name == "muon":
        cls = MuonWithAdamW
        settings["ns_dtype"] = ns_dtype
    return wrapper(groups, cls, **settings) if wrapper else cls(groups, **settings)
