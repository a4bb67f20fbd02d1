"""The supported versions of PyTorch, and fallbacks for the older ones.

Comments name the version that added a feature. Remove the fallback when that version is the minimum.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mingpt.errors import UserError


def check_torch() -> None:
    """Raises a UserError if requirements.txt does not allow this version of PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    if not (2, 10) <= (int(major), int(minor)) < (3, 0):
        raise UserError(
            f"PyTorch is {torch.__version__}, must be at least 2.10 and below 3; run pip install -r requirements.txt"
        )


def cpu_capabilities() -> Mapping[str, Any]:
    """Returns flags of this CPU, such as `amx_tile` and `avx512_bf16`, and from PyTorch 2.11 on its `cpu_name`."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    return {"amx_tile": torch.cpu._is_amx_tile_supported(), "avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
