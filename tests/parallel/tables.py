"""What the strategies have in common, and what each saves: a loss table, a resume matrix and a memory table.

    python tests/tables.py > docs/strategies.md

trains every combination on real processes over gloo and writes what came of it. The slow tests assert the same.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent.parent))  # a script has no pytest to do so

from helpers import (
    LARGE_CONFIG,
    MEMORY_KINDS,
    NO_DROPOUT,
    max_relative_error,
    open_trainer,
    run_args,
    run_captured,
    run_ranks,
    train_curves,
    train_losses,
    write_text,
)

from mingpt.parallel.memory import MemoryUsage
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.utils.device import device_kind

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def combinations(compiled: bool) -> list[dict[str, Any]]:
    """All strategies, with and without accumulation and activation checkpointing.

    Compiled ones in micro-batches of one sequence alone, a shape that all numbers of ranks share: each takes long.
    """
    recompute, sizes = ("none", "selective", "full"), (1,) if compiled else (None, 2)
    return [
        {
            "distributed__strategy": strategy,
            "trainer__micro_batch_size": size,
            "trainer__activation_checkpointing": how,
            "trainer__compile": compiled,
        }
        for strategy, size, how in itertools.product(STRATEGIES, sizes, recompute)
    ]


def save_each(folder: Path, number: int) -> list[float]:
    """Trains 6 steps with each strategy into a folder of its name, and returns the losses of steps 7 to 9."""
    for strategy in STRATEGIES:
        argv = run_args(folder / strategy, folder / "text.txt", trainer__max_steps=6, **NO_DROPOUT)
        run_ranks(number, run_captured, *argv, "--distributed.strategy", strategy, tmp_path=folder)
    argv = run_args(folder / "whole", folder / "text.txt", **NO_DROPOUT)
    [found] = run_ranks(1, _whole, *argv, tmp_path=folder)
    return found


def _whole(*argv: str) -> list[float]:
    with open_trainer(*argv) as made:
        return train_losses(made, 9)[6:]


def resume_each(folder: Path) -> dict[tuple[str, str], tuple[bool, list[float]]]:
    """For `ranks`: for each (saved by, resumed by), whether all bits came back, and the losses of the next 3 steps."""
    found = {}
    rank, number = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    for saved, resumed in itertools.product(STRATEGIES, STRATEGIES):
        run = folder / f"{saved}-{resumed}-{number}"
        if rank == "0":
            shutil.copytree(folder / saved / "snapshots", run / "snapshots")
        argv = run_args(run, folder / "text.txt", distributed__strategy=resumed, **NO_DROPOUT)
        with open_trainer(*argv, rendezvous=run.name) as made:
            snapshot = SnapshotStorage(str(folder / saved / "snapshots"), keep=9).newest(print)
            assert snapshot is not None
            same = []
            for name, weight, state in made.state.strategy.state():
                same.append(torch.equal(weight, snapshot["model"][name]))
                same += [torch.equal(state[key], value) for key, value in snapshot["optimizer"][name].items()]
            same.append(len(same) == 4 * len(snapshot["model"]))
            found[saved, resumed] = all(same), train_losses(made, 3)
    return found


def memory_of_each(folder: Path, optimizer: str = "adamw") -> dict[str, tuple[MemoryUsage, list[MemoryUsage]]]:
    """For `ranks`: for each strategy, bytes by formula on the rank with most, and measured on each."""
    found = {}
    for strategy in STRATEGIES:
        run = folder / f"{strategy}-{os.environ.get('WORLD_SIZE')}"
        knobs = {"trainer__batch_size": 4, "distributed__strategy": strategy, "optimizer__name": optimizer}
        argv = run_args(run, folder / "text.txt", **knobs, **LARGE_CONFIG)
        with open_trainer(*argv, rendezvous=strategy) as made:
            made.train_step()
            found[strategy] = made.state.need, made.context.all_gather_object(made.held)
    return found


# As Markdown


def loss_table(folder: Path, numbers: list[int], compiled: bool) -> list[str]:
    """Each combination's largest deviation from one process's plain curve over 20 steps, by number of ranks."""
    [[plain]] = run_ranks(1, train_curves, folder, [{}], 20, tmp_path=folder)
    rows = combinations(False) + (combinations(True) if compiled else [])
    columns = [run_ranks(number, train_curves, folder, rows, 20, tmp_path=folder, timeout=600)[0] for number in numbers]
    lines = [
        f"| strategy | micro-batches | activation checkpointing | compiled | {' | '.join(map(_ranks, numbers))} |",
        "|" + " --- |" * (4 + len(numbers)),
    ]
    for i, row in enumerate(rows):
        words = [
            row["distributed__strategy"],
            f"of {size}" if (size := row["trainer__micro_batch_size"]) else "one",
            row["trainer__activation_checkpointing"],
            "yes" if row["trainer__compile"] else "no",
            *(f"{max_relative_error(column[i], plain):.0e}" for column in columns),
        ]
        lines.append(f"| {' | '.join(words)} |")
    return lines


def resume_table(folder: Path, numbers: list[int]) -> list[str]:
    """What each strategy saved on two ranks, resumed by each."""
    plain = save_each(folder, 2)
    lines = [
        f"| saved by, on 2 ranks | resumed by | {' | '.join(map(_ranks, numbers))} |",
        "|" + " --- |" * (2 + len(numbers)),
    ]
    columns = [run_ranks(number, resume_each, folder, tmp_path=folder)[0] for number in numbers]
    for saved, resumed in itertools.product(STRATEGIES, STRATEGIES):
        cells = []
        for column in columns:
            same, curve = column[saved, resumed]
            cells.append(f"{'same bits' if same else 'OTHER BITS'}, then {max_relative_error(curve, plain):.0e}")
        lines.append(f"| {saved} | {resumed} | {' | '.join(cells)} |")
    return lines


def memory_table(folder: Path, numbers: list[int]) -> list[str]:
    """MiB on the rank that holds most, by formula and measured."""
    lines = [
        "| ranks | strategy | parameters | gradients | optimizer state | all three, measured / formula |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number in numbers:
        for strategy, (formula, held) in run_ranks(number, memory_of_each, folder, tmp_path=folder)[0].items():
            most = max(held, key=lambda part: part.total)
            cells = [
                f"{getattr(most, kind) / 2**20:.1f} ({getattr(formula, kind) / 2**20:.1f})" for kind in MEMORY_KINDS
            ]
            ratio = most.total / sum(getattr(formula, kind) for kind in MEMORY_KINDS)
            lines.append(f"| {number} | {strategy} | {' | '.join(cells)} | {ratio:.3f} |")
    return lines


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def main() -> None:
    """Writes all three to stdout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        parts = {
            "Losses: largest relative deviation from one process over 20 steps, fp32, batch of 7 on uneven shares": (
                loss_table(folder, [1, 2, 3, 4], compiled=True)
            ),
            "Resume: the bits that come back, and the next 3 losses' deviation from an undisturbed run": (
                resume_table(folder, [1, 2, 3])
            ),
            "Memory: MiB on the rank with most, measured (and by formula), 4 layers 512 wide, fp32": (
                memory_table(folder, [1, 2, 4])
            ),
        }
    machine = f"{device_kind(torch.device('cpu'))}, PyTorch {torch.__version__}, gloo"
    print(f"# Strategies: one truth, one snapshot, less memory\n\nWritten by `python tests/tables.py` ({machine}).")
    for title, lines in parts.items():
        print(f"\n## {title}\n", *lines, sep="\n")


if __name__ == "__main__":
    main()
