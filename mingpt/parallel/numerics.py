"""Choices that determine the last bits of a run. They depend on the hardware, and snapshots store them."""

from typing import Any, NamedTuple

import torch

from mingpt.config.conflicts import fp16_obstacle
from mingpt.config.schema import Config
from mingpt.distributed.agreement import all_gather_object, check_equal
from mingpt.distributed.context import DistributedContext
from mingpt.system.device import choose_precision, device_kind, set_deterministic
from mingpt.system.threads import choose_threads


class Numerics(NamedTuple):
    """The choices of a run."""

    precision: str  # fp32, bf16 or fp16
    choices: dict[str, Any]  # precision, threads per rank, world size, hardware and PyTorch, for the snapshot
    reasons: dict[str, str]  # rows for the summary at the start


def set_numerics(config: Config, context: DistributedContext, header: dict[str, Any] | None) -> Numerics:
    """Chooses the same precision and threads on all ranks, and sets PyTorch's threads and deterministic mode.

    Args:
        header: header of the snapshot that the run continues from. Its choices are kept where possible. None: the run
            is new

    Raises:
        UserError: ranks choose different precisions.
    """
    cfg = config.trainer
    device = context.device
    saved = header["choices"] if header else {}
    if config.distributed.reduction == "tree":  # more threads would change the bits
        threads = 1
        threads_reason = "reduction: tree"
    else:
        kept = saved["threads"] if saved.get("world_size") == context.world_size else None
        choice = choose_threads(cfg.threads, context.local_world_size, kept)
        # The slowest rank determines the time of a step.
        threads, threads_reason = min(all_gather_object(context, choice))
    precision, reason = choose_precision(cfg.precision, device, saved.get("precision"), fp16_obstacle(config))
    check_equal(context, {"the precision that trainer.precision: auto selects": precision}, advice="set it to either")
    torch.set_num_threads(threads)
    reasons = {"precision": f"{precision} ({reason})", "threads": f"{threads} per rank ({threads_reason})"}
    if cfg.deterministic:
        set_deterministic(device)
    choices = {
        "precision": precision,
        "threads": threads,
        "world_size": context.world_size,
        "hardware": device_kind(device),
        "pytorch": str(torch.__version__),  # a snapshot can't hold a TorchVersion
    }
    return Numerics(precision, choices, reasons)
