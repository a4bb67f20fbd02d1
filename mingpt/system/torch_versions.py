"""The supported versions of PyTorch, and what the older ones of them lack.

What a comment's version has is used where it is there. The rest goes once the range begins with that version.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mingpt.errors import UserError


def check_torch_version() -> None:
    """Raises a UserError if PyTorch is older or newer than what requirements.txt allows."""
    major, minor = torch.__version__.split(".")[:2]
    if not (2, 10) <= (int(major), int(minor)) < (3, 0):
        raise UserError(
            f"PyTorch is {torch.__version__} here, must be at least 2.10 and below 3: pip install -r requirements.txt"
        )


# PyTorch 2.13. It replaces all_gather_into_tensor, which warns from then on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cpu_capabilities() -> Mapping[str, Any]:
    """Flags of this CPU's instructions, among them `amx_tile` and `avx512_bf16`, and its `cpu_name` where known."""
    if hasattr(torch.cpu, "get_capabilities"):  # PyTorch 2.11
        return torch.cpu.get_capabilities()
    flags = {"amx_tile": torch.cpu._is_amx_tile_supported(), "avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search("model name\t: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return flags | ({"cpu_name": name[1]} if name else {})


def require_input_grads(stage: Any, micro_batch: int) -> None:
    """Lets a stage of a pipeline compute the gradient of what it has received from the stage before it."""
    if torch.__version__ < "2.12":  # where none is computed in a run that begins with an evaluation
        for received in stage.args_recv_info[micro_batch]:
            received.buffer.requires_grad_()
