"""Texts logged at the start and at the end of a run."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from mingpt.config import Config


def model_summary(model: nn.Module) -> str:
    """The layers of a model with their parameters, and the total in parameters and bytes."""
    rows: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = ".".join("*" if part.isdigit() else part for part in parts[:-1])
        rows.setdefault(layer, [0, 0])
        rows[layer][0] += parameter.numel()
        rows[layer][1] += parameter.numel() * parameter.element_size()
    rows["total"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [f"  {'layer':<28}{'parameters':>14}{'bytes':>16}"]
    lines += [f"  {layer:<28}{parameters:>14,}{size:>16,}" for layer, (parameters, size) in rows.items()]
    return "\n".join(lines)


def run_summary(
    config: Config,
    members: Sequence[str],
    facts: Mapping[str, str],
    characters: int,
    vocab_size: int,
    windows: int,
    last_step: int,
) -> str:
    """Ranks, choices, text and length of a run.

    Args:
        members: host and device of each rank
        facts: rows such as backend and precision
        characters: length of the text
        windows: per epoch
    """
    cfg, T = config.trainer, config.data.block_size
    epochs = last_step * cfg.batch_size / windows
    ranks = [f"GLOBAL_RANK: {i}, MEMBER: {i + 1}/{len(members)}  {member}" for i, member in enumerate(members)]
    rows = {
        **facts,
        "text": f"{config.data.path}: {characters:,} characters, {vocab_size} distinct; {windows:,} training windows",
        "batch": f"{cfg.batch_size} sequences x {T} characters, over all ranks",
        "length": f"{last_step:,} steps = {epochs:.2f} epochs",
        "run": f"{cfg.run_dir}, a snapshot every {cfg.save_every} steps: kill it at any time, the same command resumes "
        "from the newest",
    }
    return "\n".join(ranks + [f"{name:<10} {text}" for name, text in rows.items()])


def resume_summary(
    header: Mapping[str, Any], file: str, text_sha256: str, hardware: str, learning_rate: float
) -> Iterator[str]:
    """Lines that name the snapshot's file, and what has changed in this run since it was saved."""
    yield f"resuming from {file}"
    if (then := header["text_sha256"]) != text_sha256:
        yield f"the text has changed: its SHA-256 is {then} in the snapshot, {text_sha256} now"
    if (then := header["choices"].get("hardware")) != hardware:
        yield f"the hardware has changed: {then} made the snapshot, {hardware} resumes it, and last bits may differ"
    if not math.isclose(then := header["learning_rate"], learning_rate, rel_tol=1e-6):
        yield f"the learning rate of step {header['step']} was {then:.3g}, by the yaml it is now {learning_rate:.3g}"


def next_commands(snapshot: str, run_dir: str) -> str:
    """Commands to try on a finished run."""
    snapshot = shlex.quote(snapshot)
    return (
        f"to sample:  python sample.py --snapshot {snapshot}\n"
        f"to plot:    python plot.py {shlex.quote(run_dir)}\n"
        f"to export:  python export.py --snapshot {snapshot} --out FOLDER"
    )
