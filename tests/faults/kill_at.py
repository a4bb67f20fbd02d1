"""main.py, in a process that a signal ends or stops at an ordered place.

    KILL_AT=ORDERS KILL_AT_FOLDER=FOLDER python kill_at.py OPTIONS

ORDERS are a JSON list of place, rank, signal and the number of ranks that the view must have. The rank is that in the
view before, if the place is one of a change of membership; null: of a process that joins. Orders
are carried out one after another, each once another rank has the state, or, if its place is one of a change of
membership, after the one before. Two seconds after the last one, the run is stopped by SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import main  # noqa: E402
from mingpt.monitoring.run_log import MetricsFile  # noqa: E402
from mingpt.parallel.strategy import Strategy  # noqa: E402
from mingpt.program import exit_process, run_program  # noqa: E402
from mingpt.snapshot.storage import SnapshotStorage  # noqa: E402
from mingpt.survive.context import SurvivingContext  # noqa: E402
from mingpt.survive.membership import Membership  # noqa: E402
from trainer import Trainer  # noqa: E402

ORDERS, FOLDER = json.loads(os.environ["KILL_AT"]), Path(os.environ["KILL_AT_FOLDER"])
WHILE_REGROUPING = ("left", "ready", "decided", "formed", "copying", "copied")
# The place is before a call of the first function, after one of the second.
BEFORE: dict[str, tuple[type, str]] = {
    "forward": (Trainer, "train_step"),
    "collective": (SurvivingContext, "all_to_all"),
    "committed": (Trainer, "after_step"),
    "evaluating": (SurvivingContext, "all_reduce"),
    "writing": (MetricsFile, "write"),
    "saving": (SnapshotStorage, "write"),
    "left": (Membership, "_next_view"),
    "ready": (Membership, "_propose"),
}
AFTER: dict[str, tuple[type, str]] = {
    "in collective": (SurvivingContext, "all_to_all"),
    "gathered": (SurvivingContext, "all_gather"),
    "logged": (Trainer, "after_step"),
    "written": (MetricsFile, "write"),
    "saved": (SnapshotStorage, "write"),
    "decided": (Membership, "_next_view"),
    "formed": (Membership, "_form_group"),
}
contexts: list[SurvivingContext] = []
views: list[int] = []  # in which this process has finished a step


def reach(place: str) -> None:
    """Carries out the next order, if it is for this place and this process."""
    done = len(list(FOLDER.iterdir()))
    if done == len(ORDERS) or ORDERS[done][0] != place or not contexts:
        return
    _, rank, name, world_size = ORDERS[done]
    [context] = contexts
    if rank is None:
        if not context.is_joining or views:
            return
    elif context.view == 0 or context.rank != rank or context.world_size < world_size:
        return
    if place not in WHILE_REGROUPING and context.view not in views[-1:]:  # others may not have the state yet
        return
    try:
        (FOLDER / f"{done}_{place}").touch(exist_ok=False)
    except FileExistsError:  # another process has done so at the same time
        return
    if name == "hang":
        time.sleep(8)
        return
    if name == "SIGKILL later":
        time.sleep(0.3)  # in the thread that saves: some steps
        name = "SIGKILL"
    if name == "SIGSTOP":
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), getattr(signal, name))


def patch(cls: type, method: str, before: Callable[[], Any], after: Callable[[], Any]) -> None:
    original: Callable[..., Any] = getattr(cls, method)

    def patched(*args: Any, **kwargs: Any) -> Any:
        before()
        result = original(*args, **kwargs)
        after()
        return result

    setattr(cls, method, patched)


def end_after_last_order() -> None:
    time.sleep(0.05)  # leaves the processor to processes that start
    done = list(FOLDER.iterdir())
    if len(done) == len(ORDERS) and time.time() > max(file.stat().st_mtime for file in done) + 2:
        os.kill(os.getpid(), signal.SIGTERM)


def broadcast(strategy: Strategy, *args: Any, original: Any = Strategy.broadcast_full_state) -> Any:
    for i, item in enumerate(original(strategy, *args)):
        if i == 3:
            reach("copying")
        yield item
    reach("copied")


def initialize(context: SurvivingContext, *args: Any, original: Any = SurvivingContext.__init__) -> None:
    original(context, *args)
    contexts.append(context)


Strategy.broadcast_full_state = broadcast  # type: ignore[assignment, method-assign]
SurvivingContext.__init__ = initialize  # type: ignore[assignment, method-assign]
patch(Trainer, "train_step", end_after_last_order, lambda: views.append(contexts[0].view))
for place, (cls, method) in BEFORE.items():
    patch(cls, method, lambda place=place: reach(place), lambda: None)
for place, (cls, method) in AFTER.items():
    patch(cls, method, lambda: None, lambda place=place: reach(place))

if __name__ == "__main__":
    exit_process(run_program(main.main, sys.argv[1:]))
