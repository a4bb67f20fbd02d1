"""Random hangs, slow ranks and mismatched collectives: every message must name the right rank and line.

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

import main
import model
import trainer
from char_dataset import ValidationDataset
from mingpt.distributed.agreement import all_gather_object
from mingpt.distributed.health import HEARTBEAT_TIMEOUT
from mingpt.program import exit_process, run_program
from mingpt.snapshot.manager import SnapshotManager
from tests.helpers import ROOT, free_port, read_log, run_args, start_ranks, write_text
from trainer import Trainer

KINDS = HANG, MISMATCH, SLOW = ("hang", "mismatched collective", "slow rank")
STRATEGIES = ("tree", "ddp", "zero1", "zero2", "fsdp", "stages")
TIMEOUT = 2  # distributed.timeout_seconds of hangs and mismatches
STEPS = 12
SLOW_SECONDS = 6.0
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
    """A fault in a run."""

    kind: str
    place: str
    strategy: str
    world_size: int
    rank: int
    step: int
    scheme: str


class Result(NamedTuple):
    """The end of a rank."""

    status: int | None
    stderr: str
    seconds: float  # from the fault to its error


def draw_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    kind, strategy = rng.choices(KINDS, (4, 2, 1))[0], rng.choice(STRATEGIES)
    world_size = rng.choice([2, 4]) if strategy == "stages" else rng.randint(2, 4)
    places = [place for place in PLACES if kind != MISMATCH or place != "in forward"]
    rank, place = rng.randrange(world_size), rng.choice(places)
    step = STEPS if place == "at the end" else rng.choice([4, 8])
    return Plan(kind, place, strategy, world_size, rank, step, rng.choice(["file", "tcp"]))


def options(plan: Plan, folder: Path) -> list[str]:
    changes: dict[str, Any] = {"trainer__max_steps": STEPS, "trainer__save_every": 4, "distributed__strategy": "ddp"}
    changes["distributed__timeout_seconds"] = DONE_SECONDS if plan.kind == SLOW else TIMEOUT
    if plan.strategy == "tree":
        changes["distributed__reduction"] = "tree"
    elif plan.strategy == "stages":
        changes |= {"distributed__pipeline_stages": 2, "trainer__batch_size": 8}
    else:
        changes["distributed__strategy"] = plan.strategy
    if plan.scheme == "tcp":
        changes["distributed__init_method"] = f"tcp://localhost:{free_port()}"
    return run_args(folder / "run", write_text(folder / "text.txt"), **changes)


def run_rank(plan: Plan, argv: list[str], folder: Path) -> None:
    """For `start_ranks`: runs main.py with stderr in a file. The rank in the plan causes the fault."""
    rank = int(os.environ["RANK"])
    if rank == plan.rank:
        replace_function(plan, folder / "fault")
    with (folder / f"stderr-{rank}").open("w") as stderr, open(os.devnull, "w") as null:
        os.dup2(stderr.fileno(), 2)
        os.dup2(null.fileno(), 1)
    init_method = [] if plan.scheme == "tcp" else ["--distributed.init_method", os.environ["TEST_INIT_METHOD"]]
    sys.argv = ["main.py", *argv, *init_method]
    exit_process(run_program(main.main, sys.argv[1:]))


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
            if plan.kind == MISMATCH:
                all_gather_object(trainers[0].context, "unexpected")
            time.sleep(SLOW_SECONDS if plan.kind == SLOW else 1000)
        return function(*args, **kwargs)

    # Its lines are not in a file of the repository, so the position is its caller's line.
    replaced.__code__ = replaced.__code__.replace(co_filename="no file")
    setattr(owner, name, replaced)


def check(plan: Plan, line: str, results: dict[int, Result]) -> str:
    """Returns the reason why the messages are wrong, or an empty string."""
    if plan.kind == SLOW:
        if [result.status for result in results.values()] != [0] * plan.world_size:
            return f"status {results}"
        pattern = rf"warning: rank {plan.rank} is [45]\.\d seconds behind the others, at {re.escape(line)}\n"
        return "" if re.fullmatch(pattern, results[0].stderr) else f"rank 0: {results[0].stderr!r}"
    head = rf"error: all {plan.world_size} ranks are alive, but "
    if plan.kind == MISMATCH:
        head += rf"ranks? .*; (?:.*; )?rank {plan.rank}: in all_gather_object at {re.escape(line)}(?: for \d|;|\n)"
    else:
        head += rf"rank {plan.rank} \([^)]*\) has not (?:answered|[a-z ]+ collective [\d,]+); "
        head += rf"(?:.*; )?rank {plan.rank}: {re.escape(line)} for \d"
    for rank, result in results.items():
        if rank == plan.rank:
            continue
        after_the_last_collective = "main.py" in result.stderr
        if not re.match(head, result.stderr) or result.status != 1 or after_the_last_collective:
            return f"rank {rank}: {result.stderr!r}, fault at {line}"
        if result.seconds > TIMEOUT + HEARTBEAT_TIMEOUT + 1:
            return f"rank {rank}: after {result.seconds:.1f} seconds"
    return ""


def run_with_fault(plan: Plan, folder: Path) -> str:
    """Returns the reason why the messages are wrong, or an empty string."""
    processes, _ = start_ranks(plan.world_size, run_rank, plan, options(plan, folder), folder, tmp_path=folder)
    deadline = time.monotonic() + DONE_SECONDS
    for rank, process in enumerate(processes):
        if plan.kind == SLOW or rank != plan.rank:
            process.join(max(0.0, deadline - time.monotonic()))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    stderrs = [folder / f"stderr-{rank}" for rank in range(plan.world_size)]
    fault = folder / "fault"
    if not fault.exists():
        return f"no fault: {[read_log(stderr) for stderr in stderrs]}"
    results = {}
    for rank, stderr in enumerate(stderrs):
        seconds = stderr.stat().st_mtime - fault.stat().st_mtime
        results[rank] = Result(statuses[rank], read_log(stderr), seconds)
    return check(plan, fault.read_text(), results)


def run_all() -> int:
    parser = argparse.ArgumentParser(description="Makes ranks hang, and checks the messages of the other ranks.")
    parser.add_argument("--runs", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first run (default: 0)")
    args = parser.parse_args()
    right = dict.fromkeys(KINDS, 0)
    runs = dict.fromkeys(KINDS, 0)
    for seed in range(args.seed, args.seed + args.runs):
        plan = draw_plan(seed)
        with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
            failure = run_with_fault(plan, Path(folder))
        runs[plan.kind] += 1
        right[plan.kind] += not failure
        print(f"seed {seed}: {', '.join(map(str, plan))}: {f'WRONG: {failure}' if failure else 'right'}", flush=True)
    for kind, number in runs.items():
        print(f"{kind}: {right[kind]} of {number} named correctly")
    return int(right != runs)


if __name__ == "__main__":
    sys.exit(run_all())
