"""Random hangs, slow ranks and mismatched collectives: every message must name the right rank, collective and line.

python -m tests.faults.hangs --runs 200 --report report.md
"""

import argparse
import inspect
import json
import logging
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import main
import mingpt.evaluation
import model
import trainer
from char_dataset import ValidationDataset
from mingpt.distributed.heartbeat import HEARTBEAT_TIMEOUT
from mingpt.distributed.position import count_collectives
from mingpt.monitoring.logging import logger
from mingpt.snapshot.manager import SnapshotManager
from tests.helpers import ROOT, free_port, read_log, run_args, start_ranks, write_text
from trainer import Trainer

KINDS = HANG, MISMATCH, SLOW = ("hang", "mismatched collective", "slow rank")
STRATEGIES = ("tree", "ddp", "zero1", "zero2", "fsdp", "stages")
TIMEOUT = 2  # distributed.timeout_seconds of hangs and mismatches
SLOW_SECONDS = 6.0
DONE_SECONDS = 60  # to start, and to end
# Where the fault is: what is replaced, and the module and text of the line that calls it.
PLACES: dict[str, tuple[Any, str, Any, str]] = {
    "before a step": (Trainer, "train_step", trainer, "= self.train_step()"),
    "in forward": (model, "relu_squared", model, "return relu_squared(x)"),
    "after the gradients": (trainer, "learning_rate", trainer, "lr = learning_rate(self.step, self.last_step, cfg)"),
    "in an evaluation": (ValidationDataset, "count", mingpt.evaluation, "data.count(batch)"),
    "in a save": (SnapshotManager, "save", trainer, "self.snapshots.save("),
}
# The lines of this function are in no file of the repository, so the position is that of its caller.
REPLACE = """
def replaced(*args, **kwargs):
    if is_due():
        {action}
        sleep(seconds)
    return function(*args, **kwargs)
"""


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
    """What a rank says."""

    status: int | None
    stderr: str
    seconds: float  # from the fault to its error
    numbers: list[str]  # of the collectives that it has started, by group


class Run(NamedTuple):
    """A run that has ended."""

    plan: Plan
    failure: str  # why the messages are not as they should be, or empty
    results: dict[int, Result]


def draw_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    kind, strategy = rng.choices(KINDS, (4, 2, 1))[0], rng.choice(STRATEGIES)
    world_size = rng.choice([2, 4]) if strategy == "stages" else rng.randint(2, 4)
    places = [place for place in PLACES if kind != MISMATCH or place != "in forward"]
    rank, step = rng.randrange(world_size), rng.choice([4, 8])
    return Plan(kind, rng.choice(places), strategy, world_size, rank, step, rng.choice(["file", "tcp"]))


def expected_line(plan: Plan) -> str:
    *_, module, text = PLACES[plan.place]
    lines, _ = inspect.getsourcelines(module)
    [number] = [number for number, line in enumerate(lines, start=1) if text in line]
    return f"{Path(module.__file__).relative_to(ROOT)}:{number}"


def options(plan: Plan, folder: Path) -> list[str]:
    changes: dict[str, Any] = {"trainer__max_steps": 12, "trainer__save_every": 4, "distributed__strategy": "ddp"}
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
    """For `start_ranks`: runs main.py, and is at fault if it is this rank. Its stderr is a file."""
    rank = int(os.environ["RANK"])
    current: list[Trainer] = []
    faults: list[bool] = []
    is_done = Trainer.is_done

    def keep_trainer(self: Trainer) -> bool:
        if not current:
            current.append(self)
        return is_done(self)

    def is_due() -> bool:
        is_before_step = plan.place in ("before a step", "in forward")
        if not current or faults or current[0].step != plan.step - is_before_step:
            return False
        faults.append(True)
        (folder / "fault").touch()
        return True

    def note_numbers(record: logging.LogRecord) -> bool:
        if record.levelno == logging.ERROR:
            (folder / f"numbers-{rank}").write_text(json.dumps([f"{n:,}" for n in count_collectives().values()]))
        return True

    Trainer.is_done = keep_trainer  # type: ignore[method-assign]
    logger.addFilter(note_numbers)
    if rank == plan.rank:
        owner, name, *_ = PLACES[plan.place]
        gather = "current[0].context.all_gather_object('unexpected')"
        names: dict[str, Any] = {
            "is_due": is_due,
            "current": current,
            "function": getattr(owner, name),
            "sleep": time.sleep,
        }
        names["seconds"] = SLOW_SECONDS if plan.kind == SLOW else 1000
        exec(REPLACE.format(action=gather if plan.kind == MISMATCH else "pass"), names)
        setattr(owner, name, names["replaced"])
    with (folder / f"stderr-{rank}").open("w") as stderr, open(os.devnull, "w") as null:
        os.dup2(stderr.fileno(), 2)
        os.dup2(null.fileno(), 1)
    init_method = [] if plan.scheme == "tcp" else ["--distributed.init_method", os.environ["TEST_INIT_METHOD"]]
    sys.argv = ["main.py", *argv, *init_method]
    main.main()


def check(plan: Plan, results: dict[int, Result]) -> str:
    """Why the messages are not as they should be, or empty."""
    line = expected_line(plan)
    if plan.kind == SLOW:
        pattern = rf"warning: rank {plan.rank} is [45]\.\d seconds behind the others, at {re.escape(line)}\n"
        if [result.status for result in results.values()] != [0] * plan.world_size:
            return f"status {results}"
        if not re.fullmatch(pattern, results[0].stderr):
            return f"rank 0: {results[0].stderr!r}"
        return ""
    others = {rank: result for rank, result in results.items() if rank != plan.rank}
    head = rf"error: all {plan.world_size} ranks are alive, but "
    if plan.kind == MISMATCH:
        head += rf"ranks? .*; (?:.*; )?rank {plan.rank}: in all_gather_object at {re.escape(line)}(?: for \d|;|\n)"
    else:
        not_come = r"not (?:answered|come to collective (?P<number>[\d,]+)(?: \(\w+\))?)"
        head += rf"rank {plan.rank} \([^)]*\) has {not_come}; "
        head += rf"(?:.*; )?rank {plan.rank}: {re.escape(line)} for \d"
    for rank, result in others.items():
        found = re.match(head, result.stderr)
        if not found or result.status != 1 or "main.py" in result.stderr:  # where a rank is after its collective
            return f"rank {rank}: {result.stderr!r}"
        if plan.kind == HANG and plan.strategy != "stages" and not has_started(result, found["number"]):
            return f"rank {rank}: collective {found['number']}, has started {result.numbers}"
        if result.seconds > TIMEOUT + HEARTBEAT_TIMEOUT + 1:
            return f"rank {rank}: after {result.seconds:.1f} seconds"
    return ""


def has_started(result: Result, number: str | None) -> bool:
    """Whether a rank has started the collective with this number, and at most some after it."""
    numbers = [int(each.replace(",", "")) for each in result.numbers]
    return number is not None and any(0 <= each - int(number.replace(",", "")) < 20 for each in numbers)


def run_with_fault(plan: Plan, folder: Path) -> Run:
    processes, _ = start_ranks(plan.world_size, run_rank, plan, options(plan, folder), folder, tmp_path=folder)
    deadline = time.monotonic() + DONE_SECONDS
    for rank, process in enumerate(processes):
        if plan.kind == SLOW or rank != plan.rank:
            process.join(max(0.0, deadline - time.monotonic()))
    results: dict[int, Result] = {}
    if not (folder / "fault").exists():
        stderrs = [read_log(folder / f"stderr-{rank}") for rank in range(plan.world_size)]
        return Run(plan, f"no fault: {stderrs}", results)
    for rank, process in enumerate(processes):
        stderr, numbers = folder / f"stderr-{rank}", folder / f"numbers-{rank}"
        seconds = stderr.stat().st_mtime - (folder / "fault").stat().st_mtime
        counts = json.loads(numbers.read_text()) if numbers.exists() else []
        results[rank] = Result(process.exitcode, read_log(stderr), seconds, counts)
        process.kill()
        process.join()
    return Run(plan, check(plan, results), results)


def format_report(runs: Sequence[Run]) -> str:
    """A table in Markdown."""
    rows = ["| fault | number | named rightly | seconds from the timeout to the message |"]
    rows.append("| --- | --- | --- | --- |")
    for kind in KINDS:
        found = [run for run in runs if run.plan.kind == kind]
        late = [
            result.seconds - TIMEOUT
            for run in found
            for rank, result in run.results.items()
            if kind == HANG and rank != run.plan.rank
        ]
        times = f"median {statistics.median(late):.2f}, largest {max(late):.2f}" if late else ""
        rows.append(f"| {kind} | {len(found)} | {sum(not run.failure for run in found)} | {times} |")
    strategies = Counter(run.plan.strategy for run in runs)
    rows += ["", ", ".join(f"{name}: {count}" for name, count in strategies.items())]
    return "\n".join(rows)


def run_all() -> int:
    parser = argparse.ArgumentParser(description="Makes ranks hang, and compares what the others say.")
    parser.add_argument("--runs", type=int, default=200, metavar="N")
    parser.add_argument("--only", type=int, metavar="SEED", help="a single run")
    parser.add_argument("--report", type=Path, metavar="FILE", help="file for the table")
    args = parser.parse_args()
    runs: list[Run] = []
    for seed in range(args.runs) if args.only is None else [args.only]:
        plan = draw_plan(seed)
        with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
            run = run_with_fault(plan, Path(folder))
        runs.append(run)
        outcome = f"WRONG: {run.failure}" if run.failure else "right"
        print(f"seed {seed}: {', '.join(map(str, plan))}: {outcome}", flush=True)
        if args.only is not None:
            print(*(f"rank {rank}: {result}" for rank, result in run.results.items()), sep="\n")
        if args.report:  # after each run, since it may be ended
            args.report.write_text(format_report(runs) + "\n")
    print(format_report(runs))
    return int(any(run.failure for run in runs))


if __name__ == "__main__":
    sys.exit(run_all())
