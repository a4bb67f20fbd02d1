"""Random hangs and mismatched collectives: every message must name the right rank and line.

python -m tests.faults.hangs --runs 200
"""

import argparse
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import model
import trainer
from char_dataset import ValidationDataset
from mingpt.distributed.agreement import all_gather_object
from mingpt.distributed.health import HEARTBEAT_TIMEOUT
from mingpt.snapshot.manager import SnapshotManager
from tests.helpers import ROOT, free_port, main_process, read_log, run_args, start_ranks, write_text
from trainer import Trainer

STRATEGIES: dict[str, dict[str, Any]] = {
    "tree": {"distributed__reduction": "tree"},
    "stages": {"distributed__pipeline_stages": 2, "trainer__batch_size": 8},
    **{name: {"distributed__strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp")},
}
TIMEOUT = 2  # distributed.timeout_seconds
STEPS = 12
DONE_SECONDS = 60  # limit for the start and the end
# Place of the fault: a function that causes it when it is called.
PLACES: dict[str, tuple[Any, str]] = {
    "before a step": (Trainer, "train_step"),
    "in forward": (model, "attention"),
    "after the gradients": (trainer, "learning_rate"),
    "in an evaluation": (ValidationDataset, "count"),
    "in a save": (SnapshotManager, "save"),
    "at the end": (trainer, "shared_errors"),
}
AFTER_STEP = ("in an evaluation", "in a save", "at the end")


class Plan(NamedTuple):
    """A rank that hangs, or that calls a collective which no other rank calls."""

    is_mismatch: bool
    place: str
    strategy: str
    world_size: int
    rank: int
    step: int
    scheme: str


def draw_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    is_mismatch, strategy = rng.random() < 0.3, rng.choice(list(STRATEGIES))
    world_size = rng.choice([2, 4]) if strategy == "stages" else rng.randint(2, 4)
    # At the end, all ranks exchange objects in the same line.
    place = rng.choice([place for place in PLACES if not is_mismatch or place not in ("in forward", "at the end")])
    step = STEPS if place == "at the end" else rng.choice([4, 8])
    scheme = rng.choice(["file", "tcp"])
    return Plan(is_mismatch, place, strategy, world_size, rng.randrange(world_size), step, scheme)


def run_rank(plan: Plan, argv: list[str], folder: Path) -> None:
    """For `start_ranks`: runs main.py with stderr in a file. The rank in the plan causes the fault."""
    rank = int(os.environ["RANK"])
    if rank == plan.rank:
        replace_function(plan, folder / "fault")
    main_process(argv, os.devnull, folder / f"stderr-{rank}")


def replace_function(plan: Plan, file: Path) -> None:
    """Lets the function at the plan's place cause the fault once, and write the line of its caller to a file."""
    trainers: list[Trainer] = []
    train_step = Trainer.train_step
    due_step = plan.step if plan.place in AFTER_STEP else plan.step - 1

    def keep_trainer(self: Trainer) -> Any:
        trainers[:] = [self]
        return train_step(self)

    Trainer.train_step = keep_trainer  # type: ignore[method-assign]
    owner, name = PLACES[plan.place]
    function = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if trainers and trainers[0].progress.step == due_step and not file.exists():
            caller = sys._getframe(1)
            file.write_text(f"{Path(caller.f_code.co_filename).relative_to(ROOT)}:{caller.f_lineno}")
            if plan.is_mismatch:
                all_gather_object(trainers[0].context, "unexpected")
            time.sleep(1000)
        return function(*args, **kwargs)

    # Its lines are not in a file of the repository, so the position is its caller's line.
    replaced.__code__ = replaced.__code__.replace(co_filename="no file")
    setattr(owner, name, replaced)


def check(plan: Plan, line: str, statuses: list[int | None], stderrs: list[str], seconds: list[float]) -> str:
    """Returns the reason why the end of the ranks, other than the one in the plan, is wrong, or an empty string.

    Args:
        line: the line of the fault
        seconds: time from the fault to the last message of each rank
    """
    place = rf"at {re.escape(line)}"
    message = rf"error: all {plan.world_size} ranks are alive; (.*; )?rank {plan.rank}: in \w+ {place} for \d"
    differs = rf"ValueError: the place of an exchange differs between ranks: .* {place} on rank {plan.rank}"
    for rank in range(plan.world_size):
        is_right = re.match(message, stderrs[rank]) or (plan.is_mismatch and re.search(differs, "".join(stderrs)))
        if rank != plan.rank and (statuses[rank] != 1 or not is_right):
            return f"rank {rank}: {statuses[rank]} {stderrs}, fault at {line}"
        if rank != plan.rank and seconds[rank] > TIMEOUT + HEARTBEAT_TIMEOUT + 1:
            return f"rank {rank}: after {seconds[rank]:.1f} s"
    return ""


def run_with_fault(plan: Plan, folder: Path) -> str:
    """Returns the reason why the messages are wrong, or an empty string."""
    init_method = f"tcp://localhost:{free_port()}" if plan.scheme == "tcp" else f"file://{folder}/store"
    argv = run_args(
        folder / "run",
        write_text(folder / "text.txt"),
        trainer__max_steps=STEPS,
        trainer__save_every=4,
        distributed__timeout_seconds=TIMEOUT,
        distributed__init_method=init_method,
        **STRATEGIES[plan.strategy],
    )
    processes, _ = start_ranks(plan.world_size, run_rank, plan, argv, folder, tmp_path=folder)
    deadline = time.monotonic() + DONE_SECONDS
    for rank, process in enumerate(processes):
        if rank != plan.rank:
            process.join(max(0.0, deadline - time.monotonic()))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    files = [folder / f"stderr-{rank}" for rank in range(plan.world_size)]
    stderrs = [read_log(file) for file in files]
    fault = folder / "fault"
    if not fault.exists():
        return f"no fault: {stderrs}"
    seconds = [file.stat().st_mtime - fault.stat().st_mtime for file in files]
    return check(plan, fault.read_text(), statuses, stderrs, seconds)


def run_all() -> int:
    parser = argparse.ArgumentParser(description="Makes ranks hang, and checks the messages of the other ranks.")
    parser.add_argument("--runs", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first run (default: 0)")
    args = parser.parse_args()
    failures = []
    for seed in range(args.seed, args.seed + args.runs):
        plan = draw_plan(seed)
        with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
            failure = run_with_fault(plan, Path(folder))
        failures += [failure] if failure else []
        print(f"seed {seed}: {', '.join(map(str, plan))}: {f'WRONG: {failure}' if failure else 'right'}", flush=True)
    print(f"{args.runs - len(failures)} of {args.runs} named correctly")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(run_all())
