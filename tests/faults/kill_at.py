"""main.py, in a process that a signal ends or stops at an ordered place.

    KILL_AT=ORDERS KILL_AT_FOLDER=FOLDER python kill_at.py OPTIONS

ORDERS are a JSON list of place, rank, signal and the number of ranks that the view must have. The rank is that in the
view before, if the place is one of a change of membership; null: of a process that joins. Orders
are carried out one after another, each once another rank has the state, or, if its place is one of a change of
membership, after the one before. After the last one, the run is stopped by SIGTERM.
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
from mingpt.monitoring.run_log import MetricsLogger  # noqa: E402
from mingpt.parallel.strategy import Strategy  # noqa: E402
from mingpt.snapshot.storage import SnapshotStorage  # noqa: E402
from mingpt.survive.context import SurvivingContext  # noqa: E402
from mingpt.survive.membership import Membership  # noqa: E402
from trainer import Trainer  # noqa: E402

ORDERS, FOLDER = json.loads(os.environ["KILL_AT"]), Path(os.environ["KILL_AT_FOLDER"])
WHILE_REGROUPING = ("left", "ready", "decided", "formed", "copying", "copied")
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
        time.sleep(0.5)  # in the thread that saves: some steps
        name = "SIGKILL"
    if name == "SIGSTOP":
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), getattr(signal, name))


def patch(cls: type, method: str, before: str = "", after: str = "") -> None:
    original: Callable[..., Any] = getattr(cls, method)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if before:
            reach(before)
        result = original(*args, **kwargs)
        if after:
            reach(after)
        return result

    setattr(cls, method, patched)


def train_step(trainer: Trainer, original: Any = Trainer.train_step) -> Any:
    time.sleep(0.05)  # leaves the processor to processes that start
    reach("forward")
    if len(list(FOLDER.iterdir())) == len(ORDERS):
        os.kill(os.getpid(), signal.SIGTERM)
    result = original(trainer)
    views.append(contexts[0].view)
    return result


def broadcast(strategy: Strategy, *args: Any, original: Any = Strategy.broadcast_full_state) -> Any:
    for i, item in enumerate(original(strategy, *args)):
        if i == 3:
            reach("copying")
        yield item
    reach("copied")


def initialize(context: SurvivingContext, *args: Any, original: Any = SurvivingContext.__init__) -> None:
    original(context, *args)
    contexts.append(context)


Trainer.train_step = train_step  # type: ignore[method-assign]
Strategy.broadcast_full_state = broadcast  # type: ignore[assignment, method-assign]
SurvivingContext.__init__ = initialize  # type: ignore[assignment, method-assign]
patch(SurvivingContext, "all_to_all", before="collective", after="in collective")
patch(SurvivingContext, "all_gather", after="gathered")
patch(Trainer, "after_step", before="committed", after="logged")
patch(SurvivingContext, "all_reduce", before="evaluating")
patch(MetricsLogger, "log_train", before="writing", after="written")
patch(SnapshotStorage, "write", before="saving", after="saved")
patch(Membership, "_next_view", before="left", after="decided")
patch(Membership, "_propose", before="ready")
patch(Membership, "_form_group", after="formed")

if __name__ == "__main__":
    main.main()
