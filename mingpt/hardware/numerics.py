"""Choices that determine the last bits of a run: rules on hardware flags, saved in the snapshot and kept on resume."""

from typing import Any, NamedTuple

import torch

from mingpt.config import TrainerConfig
from mingpt.hardware.device import choose_precision, device_kind, set_deterministic
from mingpt.hardware.threads import choose_threads


class Numerics(NamedTuple):
    """What was chosen."""

    precision: str  # fp32, bf16 or fp16
    threads: int  # CPU threads of this rank
    choices: dict[str, Any]  # the same with world size and hardware, for the snapshot
    reasons: dict[str, str]  # rows for the summary at the start


def choose_numerics(
    cfg: TrainerConfig,
    device: torch.device,
    world_size: int,
    local_world_size: int,
    one_thread: bool,
    previous: dict[str, Any],
) -> Numerics:
    """Chooses precision and threads, and applies threads and `deterministic`.

    Args:
        one_thread: the strategy needs one thread per rank
        previous: the choices in the snapshot, or empty

    Raises:
        UserError: the device does not support the precision.
    """
    threads = 1
    threads_reason = "reduction: tree"
    if not one_thread:  # otherwise only the same number of ranks can repeat the bits
        kept = previous["threads"] if previous.get("world_size") == world_size else None
        threads, threads_reason = choose_threads(cfg.threads, local_world_size, kept)
    precision, reason = choose_precision(cfg.precision, device, previous.get("precision"))
    torch.set_num_threads(threads)
    reasons = {"precision": f"{precision} ({reason})", "threads": f"{threads} per rank ({threads_reason})"}
    if cfg.deterministic:
        set_deterministic(device)
    elif device.type == "cuda":  # attention's backward pass adds in varying order
        reasons["resume"] = (
            "equals an uninterrupted run to rounding error; with trainer.deterministic: true, to the last bit"
        )
    return Numerics(
        precision,
        threads,
        {"precision": precision, "threads": threads, "world_size": world_size, "hardware": device_kind(device)},
        reasons,
    )
