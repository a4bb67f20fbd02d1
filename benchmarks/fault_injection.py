"""main.py with a fault that its last rank injects into itself, for benchmarks/selftest_checks.py.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.fault_injection FAULT FOLDER [OPTIONS OF main.py]

Each rank writes its process id to FOLDER/pid-RANK, and the last one the time of the fault to FOLDER/struck.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import main
from mingpt.parallel.strategy import Strategy

STRIKE_AT = 6  # number of the forward pass
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "oom": None}  # None: out of memory


def inject(fault: str, folder: Path) -> None:
    """Makes this rank strike in one of its forward passes, if it is the last rank."""
    compute_loss = Strategy.compute_loss
    number = FAULTS[fault]
    calls = 0

    def strike(strategy: Strategy, model: Any, idx: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == STRIKE_AT:
            (folder / "struck").write_text(str(time.time()))
            if number is None:
                torch.empty(2**50, dtype=torch.uint8, device=strategy.context.device)
            else:
                os.kill(os.getpid(), number)
        return compute_loss(strategy, model, idx, targets)

    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        Strategy.compute_loss = strike  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    fault, folder, *sys.argv[1:] = sys.argv[1:]
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if fault != "none":
        inject(fault, Path(folder))
    main.main()
