"""Tensor utilities."""

from torch import Tensor


def to_local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # importing DTensor for isinstance is slow
