"""The training loss."""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -1  # target of a position that has no next character


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats per character, of logits (B, T, V) and targets (B, T); IGNORE_INDEX is left out."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
