"""What pipeline stages change, and what not: losses, what they go with, snapshots, memory.

    python tests/stages.py > docs/pipeline.md

trains every combination on real processes over gloo and writes what came of it. The slow tests assert the same.
"""

from __future__ import annotations

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

from benchmarks.pipeline_timeline import draw, steps, traces_of
from mingpt.config_parser import read_config
from mingpt.parallel.memory import MemoryUsage
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.utils.device import device_kind
from mingpt.utils.errors import UserError

# Four blocks, and eight micro-batches in a batch: enough for two replicas of four stages.
FOUR: dict[str, Any] = {"model__n_layer": 4, "trainer__batch_size": 8, "trainer__micro_batch_size": 1}
# Stages that are equal but for the embeddings, and enough work in each pass for what a message takes not to count.
EQUAL: dict[str, Any] = {
    "data__block_size": 128,
    "model__n_embd": 384,
    "model__n_head": 6,
    "trainer__max_steps": 24,
    "trainer__eval_every": 24,
    "trainer__save_every": 24,
    "trainer__profile_steps": 12,
}
INTRODUCTION = """\
Ranks are a mesh of replicas x stages, and blocks are dealt out evenly: embeddings are on the first stage, the head,
tied to them, is on the last. Of S stages and M micro-batches in a replica's share, none can keep all busy for more than
M / (M + S - 1) of the time. fp16 wants a GPU; that all stages skip a step that overflows on one is tested on CPUs."""
PICTURE = Path(__file__).parent.parent / "docs/pipeline.png"
MESHES = [(replicas, stages) for stages in (1, 2, 4) for replicas in (1, 2)]
# What is set beside two stages on two replicas.
COMPANY: dict[str, dict[str, Any]] = {
    "pipeline_schedule: gpipe": {"distributed__pipeline_schedule": "gpipe"},
    "strategy: ddp": {},
    "strategy: zero1": {"distributed__strategy": "zero1"},
    "strategy: zero2": {"distributed__strategy": "zero2"},
    "strategy: fsdp": {"distributed__strategy": "fsdp"},
    "activation_checkpointing: selective": {"trainer__activation_checkpointing": "selective"},
    "activation_checkpointing: full": {"trainer__activation_checkpointing": "full"},
    "the same with fsdp": {"distributed__strategy": "fsdp", "trainer__activation_checkpointing": "full"},
    "optimizer.name: muon": {"optimizer__name": "muon"},
    "the same with zero1": {"distributed__strategy": "zero1", "optimizer__name": "muon"},
    "the same with fsdp, its matrices in parts": {"distributed__strategy": "fsdp", "optimizer__name": "muon"},
    "precision: bf16": {"trainer__precision": "bf16"},
    "compile: true": {"trainer__compile": True},
    "compile: true with fsdp": {"distributed__strategy": "fsdp", "trainer__compile": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    "reduction: tree": {"distributed__reduction": "tree"},
    "cpu_offload: true": {"distributed__strategy": "fsdp", "distributed__cpu_offload": True},
}
RESUMED = {  # what goes on from a run of two stages: its mesh and strategy
    "1 process": (1, 1, "ddp"),
    "4 stages": (1, 4, "ddp"),
    "2 replicas x 2 stages": (2, 2, "ddp"),
    "2 replicas x 2 stages, fsdp": (2, 2, "fsdp"),
    "fsdp on 2 ranks": (2, 1, "fsdp"),
}


def on(stages: int, **knobs: Any) -> dict[str, Any]:
    """Knobs of a run of so many stages."""
    return FOUR | {"distributed__pipeline_stages": stages} | knobs


def save_two_stages(folder: Path) -> list[float]:
    """Trains 6 steps on two stages into a folder of that name; losses of steps 7 to 9 of one process."""
    run_ranks(
        2,
        run_captured,
        *run_args(folder / "saved", folder / "text.txt", trainer__max_steps=6, **NO_DROPOUT, **on(2)),
        tmp_path=folder,
    )
    [[found]] = run_ranks(1, train_curves, folder, [FOUR], 9, tmp_path=folder)
    return found[6:]


def resume(folder: Path, name: str) -> tuple[bool, list[float]]:
    """For `ranks`: whether all bits came back in what RESUMED calls so, and the losses of the next 3 steps."""
    _, stages, strategy = RESUMED[name]
    run = folder / name.replace(" ", "-")
    if os.environ.get("RANK", "0") == "0":
        shutil.copytree(folder / "saved" / "snapshots", run / "snapshots")
    knobs = on(stages, distributed__strategy=strategy)
    with open_trainer(*run_args(run, folder / "text.txt", **NO_DROPOUT, **knobs)) as made:
        snapshot = SnapshotStorage(str(folder / "saved" / "snapshots"), keep=9).newest(print)
        assert snapshot is not None
        assert snapshot["step"] == made.state.step == 6
        back = {key: (weight, state) for key, weight, state in made.state.strategy.state()}
        same = list(back) == list(snapshot["model"])
        for parameter, (weight, state) in back.items():
            kept = snapshot["optimizer"][parameter]
            same &= torch.equal(weight, snapshot["model"][parameter]) and state.keys() == kept.keys()
            same &= all(torch.equal(state[key], kept[key]) for key in kept)
        return same, train_losses(made, 3)


def memory_of(folder: Path, stages: int) -> tuple[MemoryUsage, list[MemoryUsage], list[int]]:
    """For `ranks`: bytes by formula on the rank with most; on each, measured, and those of embeddings among them."""
    with open_trainer(
        *run_args(folder / f"memory-{stages}", folder / "text.txt", **(on(stages) | LARGE_CONFIG))
    ) as made:
        made.train_step()
        strategy = made.state.strategy
        embeddings = sum(weight.nbytes for name, weight in strategy.parameters.items() if "transformer.w" in name)
        return (
            made.state.need,
            made.context.all_gather_object(made.held),
            made.context.all_gather_object(4 * embeddings),
        )


# As Markdown


def loss_table(folder: Path) -> list[str]:
    """Each mesh's largest deviation from one process's curve over 20 steps, under both schedules."""
    [[plain]] = run_ranks(1, train_curves, folder, [FOUR], 20, tmp_path=folder)
    lines = ["| replicas | stages | 1f1b | gpipe |", "| --- | --- | --- | --- |"]
    for replicas, stages in MESHES:
        both = [on(stages, distributed__pipeline_schedule=schedule) for schedule in ("1f1b", "gpipe")]
        found, *_ = run_ranks(replicas * stages, train_curves, folder, both, 20, tmp_path=folder)
        cells = [f"{max_relative_error(curve, plain):.0e}" for curve in found] if stages > 1 else ["not cut", "not cut"]
        lines.append(f"| {replicas} | {stages} | {' | '.join(cells)} |")
    return lines


def company_table(folder: Path) -> list[str]:
    """What else is set on two replicas of two stages, and the deviation from one process that has it too."""
    alone = [FOUR | COMPANY[name] | {"trainer__compile": False, "distributed__strategy": "ddp"} for name in COMPANY]
    [plain] = run_ranks(1, train_curves, folder, alone, 20, tmp_path=folder)
    found, *_ = run_ranks(
        4, train_curves, folder, [on(2, **knobs) for knobs in COMPANY.values()], 20, tmp_path=folder, timeout=600
    )
    lines = ["| with | |", "| --- | --- |"]
    for name, curve, other in zip(COMPANY, found, plain, strict=True):
        lines.append(f"| {name} | {max_relative_error(curve, other):.0e} |")
    for name, knobs in REFUSED.items():
        lines.append(f"| {name} | refused: `{refusal(folder, knobs)}` |")
    return lines


def refusal(folder: Path, knobs: dict[str, Any]) -> str:
    """What is said of these knobs beside two stages."""
    try:
        read_config(run_args(folder, folder / "text.txt", **on(2, **knobs)))
    except UserError as error:
        return str(error).split(" (in the command line)")[0]
    raise AssertionError(f"{knobs} go with stages")


def resume_table(folder: Path) -> list[str]:
    """What two stages saved, resumed by others."""
    plain = save_two_stages(folder)
    lines = ["| saved by 2 stages, resumed by | bits | next 3 losses |", "| --- | --- | --- |"]
    for name, (replicas, stages, _) in RESUMED.items():
        same, curve = run_ranks(replicas * stages, resume, folder, name, tmp_path=folder)[0]
        lines.append(f"| {name} | {'the same' if same else 'OTHERS'} | {max_relative_error(curve, plain):.0e} |")
    return lines


def memory_table(folder: Path) -> list[str]:
    """MiB on the rank that holds most, and its blocks' share of all blocks."""
    lines = [
        "| stages | parameters | gradients | optimizer state | all, measured / formula | embeddings aside, x stages |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for stages in (1, 2, 4):
        formula, held, embeddings = run_ranks(stages, memory_of, folder, stages, tmp_path=folder)[0]
        blocks = max(part.total - rest for part, rest in zip(held, embeddings, strict=True))
        if stages == 1:
            all_blocks = blocks
        most = max(held, key=lambda part: part.total)
        cells = [f"{getattr(most, kind) / 2**20:.1f}" for kind in MEMORY_KINDS]
        ratio = most.total / sum(getattr(formula, kind) for kind in MEMORY_KINDS)
        lines.append(f"| {stages} | {' | '.join(cells)} | {ratio:.3f} | {blocks * stages / all_blocks:.3f} |")
    return lines


def bubble_table(folder: Path, picture: Path) -> list[str]:
    """How long two equal stages of one thread wait, by the median of profiled steps, and a step drawn."""
    lines = ["| micro-batches | 1f1b | gpipe | (S - 1) / (M + S - 1) |", "| --- | --- | --- | --- |"]
    for number in (2, 4, 8):
        cells = []
        for schedule in ("1f1b", "gpipe"):
            run = folder / f"{schedule}-{number}"
            knobs = EQUAL | on(2, trainer__batch_size=4 * number, trainer__micro_batch_size=4)
            argv = run_args(run, folder / "text.txt", distributed__pipeline_schedule=schedule, **knobs)
            run_ranks(2, run_captured, *argv, tmp_path=folder)
            found = sorted(steps(traces_of(run)), key=lambda step: step.bubble)
            typical = found[len(found) // 2]
            cells.append(f"{typical.bubble:.1%} ({found[0].bubble:.1%} to {found[-1].bubble:.1%})")
            if (schedule, number) == ("1f1b", 4):
                draw(typical, picture)
        lines.append(f"| {number} | {' | '.join(cells)} | {typical.least:.1%} |")
    return lines


def main() -> None:
    """Writes all to stdout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        parts = {
            "Losses: largest relative deviation from one process over 20 steps, fp32": loss_table(folder),
            "Company: 2 replicas x 2 stages, deviation from one process over 20 steps, fp32": company_table(folder),
            "Resume: the bits that come back, and the next 3 losses' deviation from one process": resume_table(folder),
            "Memory: MiB on the rank with most, 4 layers 512 wide, fp32, AdamW": memory_table(folder),
            "Bubble: how long two stages of one thread wait, 4 layers 384 wide, T 128, micro-batches of 4": (
                [*bubble_table(folder, PICTURE), "", f"![a step of two stages, four micro-batches]({PICTURE.name})"]
            ),
        }
    machine = f"{device_kind(torch.device('cpu'))}, PyTorch {torch.__version__}, gloo"
    print(f"# Pipeline stages: one truth, one snapshot\n\nWritten by `python tests/stages.py` ({machine}).")
    print(f"\n{INTRODUCTION}")
    for title, lines in parts.items():
        print(f"\n## {title}\n", *lines, sep="\n")


if __name__ == "__main__":
    main()
