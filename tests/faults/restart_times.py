"""main.py, which writes to the file RESTART_TIMES when it reaches each place of its start.

    RESTART_TIMES=FILE python restart_times.py OPTIONS

A line has process id, place and time (seconds since 1970). Places are those of PARTS in restart.py.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
FILE = os.open(os.environ["RESTART_TIMES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
reached: set[str] = set()


def reach(place: str, at: float | None = None) -> None:
    """Writes a place the first time that it is reached."""
    if place not in reached:
        reached.add(place)
        os.write(FILE, f"{os.getpid()} {place} {at or time.time()}\n".encode())


def process_start() -> float:
    """The time when the kernel started this process, with a resolution of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def before(owner: Any, name: str, place: str, action: Callable[[], None] = lambda: None) -> None:
    """Reaches a place whenever a function is called."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        reach(place)
        action()
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def patch_library() -> None:
    """Patches what main.py has just imported. An import at the top of this file would take the time from main.py."""
    import torch.distributed as dist

    import trainer
    from mingpt.distributed.context import DistributedContext
    from mingpt.run import start, summary

    before(dist, "init_process_group", "init_process_group")
    before(DistributedContext, "__init__", "context")
    before(start, "tune_malloc", "prepare_run")
    before(trainer, "lock_run", "lock")
    before(trainer.SnapshotManager, "__init__", "snapshot")
    before(trainer, "load_corpus", "text")
    before(trainer, "agree_on_numerics", "strategy")
    before(trainer.SnapshotManager, "restore", "restore")
    before(trainer, "FiniteGuard", "guard")
    before(summary, "start", "summary")
    before(trainer.RunLog, "open", "log")
    before(trainer.Trainer, "advance", "step")
    before(trainer.Trainer, "after_step", "finished")


if __name__ == "__main__":
    reach("process", process_start())
    reach("script")
    import main
    from mingpt.monitoring import logging
    from mingpt.program import exit_process, run_program

    before(main, "read_config", "config")
    before(main, "allow_connections", "imports")
    before(logging, "set_rank", "rendezvous", patch_library)
    exit_process(run_program(main.main, sys.argv[1:]))
