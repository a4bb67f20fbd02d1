"""How fast is it? Ratios, measured in turn in one run on this machine.

    torchrun --standalone --nproc_per_node=2 bench.py reduction
    torchrun --standalone --nproc_per_node=2 bench.py strategies
    python bench.py snapshots --model.n_embd 256

What follows the name of the measurement are main.py's own options.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distributed import World, connect
from main import read_config
from trainer import Trainer

TEXT = "In the beginning there was a text, and it was made of characters.\n" * 2000


def seconds(action: Callable[[], Any], times: int = 1) -> float:
    """Seconds that an action takes, all times together."""
    began = time.perf_counter()
    for _ in range(times):
        action()
    return time.perf_counter() - began


def trainer(world: World, folder: str, *words: str) -> Trainer:
    """A warm trainer of the default yaml and these options, with its run in the folder."""
    text = Path(folder, "text.txt")
    text.write_text(TEXT)
    with redirect_stdout(io.StringIO()):
        made = Trainer(read_config(["--data.path", str(text), "--trainer.run_dir", folder, *words]), world)
    for _ in range(5):
        made._step()
    return made


def reduction(folder: str, words: Sequence[str]) -> None:
    """What the same bits at every number of ranks cost: a step with the tree, in steps with DDP."""
    words = ["--trainer.micro_batch_size", "3", "--trainer.threads", "1", *words]
    compare(folder, words, "--distributed.reduction", "fast", "tree")


def strategies(folder: str, words: Sequence[str]) -> None:
    """What it costs to deal out state: a step with each strategy, in steps with DDP."""
    for strategy in ("zero1", "zero2", "fsdp"):
        compare(folder, words, "--distributed.strategy", "ddp", strategy)


def compare(folder: str, words: Sequence[str], key: str, one: str, other: str) -> None:
    """Prints a step's time with the key's one value in that with its other value."""
    with connect(replace(read_config(words).distributed, strategy="fsdp")) as world:  # a group, be it of one rank
        first, second = (trainer(world, tempfile.mkdtemp(dir=folder), *words, key, way) for way in (one, other))
        ratios = sorted(1 / (seconds(first._step, 20) / seconds(second._step, 20)) for _ in range(10))
        if world.rank == 0:
            print(
                f"{world.size} ranks: a step with {other} takes {statistics.median(ratios):.3f} of one with {one} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} pairs of 20 steps each, in turn)"
            )


def snapshots(folder: str, words: Sequence[str]) -> None:
    """How long a snapshot holds the step, in plain copies of the same state, and what save_every 100 costs in all."""
    with connect(read_config(words).distributed) as world:
        made = trainer(world, folder, *words)
        state, save = made.state, lambda: made.state.save(None, last=False)
        tensors = [*state.model.parameters()]
        tensors += [tensor for moments in state.strategy.stepper.state.values() for tensor in moments.values()]
        copies = [torch.empty_like(tensor) for tensor in tensors]

        def copy() -> None:
            for aside, tensor in zip(copies, tensors, strict=True):
                aside.data.copy_(tensor)

        stalls = []
        for _ in range(40):
            state.writer.wait()
            made._step()  # so that neither finds the state in the processor's cache because of the other
            plain = seconds(copy)
            made._step()
            stalls.append(seconds(save) / plain)
        print(
            f"a snapshot holds the step for {statistics.median(stalls[5:]):.2f} plain copies of its state, "
            f"{sum(tensor.nbytes for tensor in tensors):,} bytes (median of {len(stalls[5:])})"
        )
        costs = []
        for _ in range(8):
            state.writer.wait()
            without = seconds(made._step, 100)
            costs.append((seconds(save) + seconds(made._step, 100)) / without - 1)
        state.writer.wait()
        print(
            f"save_every 100 costs {statistics.median(costs):+.2%} of a step's time "
            f"({min(costs):+.2%} to {max(costs):+.2%} in {len(costs)} pairs of 100 steps, in turn)"
        )


MEASUREMENTS = {"reduction": reduction, "strategies": strategies, "snapshots": snapshots}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MEASUREMENTS:
        sys.exit(f"usage: bench.py {{{','.join(MEASUREMENTS)}}} [--section.key VALUE ...]")
    with tempfile.TemporaryDirectory() as folder:
        MEASUREMENTS[sys.argv[1]](folder, sys.argv[2:])
