"""A campaign of random faults: real processes are killed, stopped and restarted, and every run must end in the bits of
an undisturbed one.

    python -m tests.faults.campaign --report report.md

A run is a function of its seed, except for the timing of the machine: `--only 17` repeats one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import survive
from tests.helpers import (
    ROOT,
    TORCHRUN,
    assert_equal_snapshots,
    clean_env,
    find_processes,
    kill_processes,
    loss_curve,
    run_args,
    write_text,
)

KINDS = KILL, KILL_LAUNCHER, KILL_ALL, TERM, TERM_ALL, PAUSE, STOP = (
    "SIGKILL of a worker",
    "SIGKILL of the launcher",
    "SIGKILL of launcher and workers",
    "SIGTERM to the launcher",
    "SIGTERM to launcher and workers",
    "SIGSTOP of a worker, brief",
    "SIGSTOP of a worker, lasting",
)
MIN_FAULTS, MAX_FAULTS, CAMPAIGN_FAULTS = 4, 6, 200  # of a run, and of a campaign
STEPS = 400  # more than MAX_FAULTS use up, so that all faults happen before the end
TIMEOUT = 150  # seconds to start, to stop or to reach a step, each of which takes ten


class Plan(NamedTuple):
    """The options of a run.

    Args:
        strategy: distributed.strategy, or tree
        world_sizes: number of ranks of each start of the launcher
        uses_launcher: otherwise, a single process runs without torchrun
        stages: pipeline stages
    """

    strategy: str
    optimizer: str
    world_sizes: list[int]
    uses_launcher: bool
    save_every: int
    stages: int


def draw_plan(rng: random.Random, stages: int) -> Plan:
    strategy = rng.choice(["tree", "ddp", "zero1", "zero2", "fsdp"])
    optimizer = rng.choice(["adamw", "muon"])
    world_sizes = [rng.randint(1, 4)]
    for _ in range(MAX_FAULTS):  # only the bits of the tree are the same for another number of ranks
        others = [other for other in range(1, 5) if other != world_sizes[-1]]
        world_sizes.append(rng.choice(others) if strategy == "tree" else world_sizes[-1])
    if stages > 1:  # the tree does not go with stages
        strategy, world_sizes = strategy.replace("tree", "ddp"), [stages * rng.randint(1, 2)] * len(world_sizes)
    return Plan(strategy, optimizer, world_sizes, rng.random() < 0.5, rng.choice([1, 2, 3, 5, 7, 10, 15, 20]), stages)


class Run:
    """main.py in processes of its own, started again whenever a fault has ended it.

    Attributes:
        faults: kind, step, and whether a snapshot was being written, of each fault that happened
        lost_steps: the steps that each start had to repeat
        failure: why the run is not as it should be, or empty
    """

    def __init__(self, plan: Plan, run_dir: Path, text: Path) -> None:
        self.plan, self.run_dir = plan, run_dir
        key = "distributed__reduction" if plan.strategy == "tree" else "distributed__strategy"
        options: dict[str, Any] = {key: plan.strategy, "optimizer__name": plan.optimizer}
        options |= {"distributed__timeout_seconds": 8, "trainer__max_steps": STEPS}
        options |= {"trainer__save_every": plan.save_every, "trainer__eval_every": 40}
        if plan.stages > 1:
            options |= {"distributed__pipeline_stages": plan.stages, "trainer__batch_size": 8}
        self.argv = run_args(run_dir, text, **options)
        self.variable = f"CAMPAIGN_RUN={uuid.uuid4().hex}"
        self.log = run_dir.with_suffix(".log").open("w")
        self.launches, self.starts, self.started_at, self.step = 0, 0, 0.0, 0
        self.faults: list[tuple[str, int, bool]] = []
        self.lost_steps: list[int] = []
        self.failure, self.may_exit, self.done = "", False, False
        self.launch()

    def launch(self) -> None:
        world_size = self.plan.world_sizes[self.launches]
        self.launches += 1
        self.is_single = world_size == 1 and not self.plan.uses_launcher
        launcher = [] if self.is_single else [*TORCHRUN, f"--nproc_per_node={world_size}", "--max_restarts=20"]
        command = [sys.executable, *launcher, str(ROOT / "main.py"), *self.argv]
        env = clean_env(**dict([self.variable.split("=")]))
        # In a session of its own, since on Ctrl-C the campaign ends its processes itself.
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=env, start_new_session=True)

    def workers(self) -> list[int]:
        """Process ids by rank."""
        ranks = find_processes(self.variable)
        return [self.process.pid] if self.is_single else sorted(filter(ranks.get, ranks), key=ranks.__getitem__)

    def update(self) -> None:
        """Reads the progress of the run, and starts it again if a fault has ended it."""
        status, lines = self.process.poll(), []  # status first, so that all rows of an ended run are read
        with suppress(FileNotFoundError):
            lines = (self.run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-80:]
        for row in (json.loads(line) for line in lines if line.endswith(b"\n")):
            if row["event"] == "start" and row["time"] > self.started_at:
                self.started_at, self.starts = row["time"], self.starts + 1
                self.lost_steps.append(self.step - row["step"])
                self.step = row["step"]
            elif row["event"] == "train":
                self.step = max(self.step, row["step"])
        if status == 0:
            self.done = True
        elif status is not None and not self.may_exit:
            raise AssertionError(f"exit status {status} at step {self.step}, which no fault explains")
        elif status is not None and not find_processes(self.variable):
            self.may_exit = False
            self.launch()

    def wait(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if self.done or time.monotonic() > deadline:
                raise AssertionError(f"{name}: not {'before the end' if self.done else f'within {TIMEOUT} s'}")
            time.sleep(0.01)
            self.update()

    def inject_fault(self, rng: random.Random) -> None:
        """Causes a fault, and waits until the run has continued."""
        # Always the same number of draws, so that the outcome of a fault does not change the next one.
        kind, target = rng.choices(KINDS, (3, 2, 2, 2, 2, 1, 2))[0], self.step + rng.randint(0, 25)
        aims_at_save, index, wakes = rng.random() < 1 / 3, rng.randrange(12), rng.random() < 0.5
        delay, pause = rng.uniform(0, 0.04), rng.uniform(0.5, 1.5)
        self.wait(lambda: self.step >= target, f"step {target}")
        workers, launcher, starts = self.workers(), self.process.pid, self.starts
        victim = workers[0 if aims_at_save else index % len(workers)]  # rank 0 writes snapshots
        in_save = aims_at_save and survive.wait_for_save(self.run_dir)
        time.sleep(0 if aims_at_save else delay)
        all_pids = list({launcher, *workers})
        pids = {TERM: [launcher], KILL_LAUNCHER: [launcher], KILL_ALL: all_pids, TERM_ALL: all_pids}
        for pid in pids.get(kind, [victim]):
            os.kill(pid, signal.Signals[kind.split()[0]])
        self.may_exit = kind in pids or (self.is_single and kind != PAUSE)
        self.update()
        self.faults.append((kind, self.step, in_save))
        if kind == STOP:
            self.wait(lambda: set(self.workers()) <= {victim}, "exit of the other ranks")
        if kind in (PAUSE, STOP):
            time.sleep(pause)
            wakes = kind == PAUSE or (wakes and len(workers) > 1)
            os.kill(victim, signal.SIGCONT if wakes else signal.SIGKILL)
        if kind != PAUSE:
            self.wait(lambda: self.starts > starts, f"a start after {kind}")
        lost, save_every = self.lost_steps[-1], self.plan.save_every
        if kind in (TERM, TERM_ALL) and lost:
            raise AssertionError(f"{kind}: {lost} steps lost, although it saves")
        if lost > 2 * save_every:  # the next save waits for the one that is being written
            raise AssertionError(f"{kind}: {lost} steps lost, with save_every {save_every}")

    def close(self) -> None:
        kill_processes(self.variable)
        self.process.wait()
        self.log.close()


def undisturbed_run(plan: Plan, folder: Path, text: Path) -> Path:
    """The folder of a run without faults that ends in the bits of the plan's run; trained at the first call."""
    world_size = 1 if plan.strategy == "tree" else plan.world_sizes[0]
    run_dir = folder / f"{plan.strategy}-{plan.optimizer}-{world_size}-{plan.stages}"
    if not run_dir.exists():
        with closing(
            Run(plan._replace(world_sizes=[world_size], uses_launcher=False, save_every=100), run_dir, text)
        ) as run:
            run.wait(lambda: run.done, "the end of the undisturbed run")
    return run_dir


def run_with_faults(seed: int, folder: Path, stages: int = 1) -> Run:
    """Runs the plan of a seed with all its faults; the folder keeps undisturbed runs for the next seeds."""
    text, run_dir, rng = write_text(folder / "text.txt"), folder / f"seed-{seed}", random.Random(seed)
    plan = draw_plan(rng, stages)
    undisturbed = undisturbed_run(plan, folder, text)
    with closing(Run(plan, run_dir, text)) as run:
        try:
            run.wait(lambda: run.starts == 1, "the first start")
            for _ in range(rng.randint(MIN_FAULTS, MAX_FAULTS)):
                run.inject_fault(rng)
            run.wait(lambda: run.done, "the end")
            assert_equal_snapshots(undisturbed, run_dir)
            assert loss_curve(undisturbed) == loss_curve(run_dir), "losses"
            assert run.starts == 1 + sum(kind != PAUSE for kind, *_ in run.faults), "a restart that no fault explains"
        except (AssertionError, ProcessLookupError) as error:
            output = run_dir.with_suffix(".log").read_text(errors="replace")
            run.failure = f"{type(error).__name__}: {error}\n{output[-6000:]}"
    shutil.rmtree(run_dir, ignore_errors=True)
    return run


def format_run(seed: int, run: Run) -> str:
    plan, again = run.plan, f"again: python -m tests.faults.campaign --only {seed}"
    parts = [f"{plan.strategy}, {plan.optimizer}, save_every {plan.save_every}"]
    parts[0] += f", ranks {', '.join(map(str, plan.world_sizes[: run.launches]))}"
    parts[0] += " without launcher" * run.is_single + f", {plan.stages} stages" * (plan.stages > 1)
    parts.append(", ".join(f"{kind} @{step}{' while saving' * in_save}" for kind, step, in_save in run.faults))
    parts.append(f"{sum(run.lost_steps)} steps recomputed")
    return ": ".join([f"seed {seed}", *parts, f"DIFFERENT: {run.failure}\n{again}" if run.failure else "equal"])


def format_report(runs: Sequence[Run]) -> str:
    """A table in Markdown."""
    rows = ["| fault | number | while saving | recovered bit for bit |", "| --- | --- | --- | --- |"]
    faults = [(kind, in_save, not run.failure) for run in runs for kind, _, in_save in run.faults]
    for name, kinds in [*((kind, [kind]) for kind in KINDS), ("total", KINDS)]:
        found = [(in_save, equal) for kind, in_save, equal in faults if kind in kinds]
        in_saves, equals = sum(in_save for in_save, _ in found), sum(equal for _, equal in found)
        rows.append(f"| {name} | {len(found)} | {in_saves} | {equals} |")
    lost = [(steps, steps - run.plan.save_every) for run in runs for steps in [0, *run.lost_steps]]
    most, beyond = (max(0, *column) for column in zip(*lost, strict=True))
    equal = sum(not run.failure for run in runs)
    rows += ["", f"{equal} of {len(runs)} runs ended with the bits of an undisturbed run."]
    rows += [f"Most steps recomputed after a fault: {most}; beyond save_every: {beyond}."]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Injects random faults into runs and compares where they end.")
    parser.add_argument("--runs", type=int, metavar="N", help=f"default: until {CAMPAIGN_FAULTS} faults have happened")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")
    parser.add_argument("--only", type=int, metavar="SEED", help="a single run")
    parser.add_argument("--stages", type=int, default=1, metavar="N", help="pipeline stages of all runs (default: 1)")
    parser.add_argument("--survive", action="store_true", help="runs with distributed.survive, which restart nothing")
    parser.add_argument("--report", type=Path, metavar="FILE", help="file for the table")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that all processes are ended
    runs: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for seed in count(args.seed) if args.only is None else [args.only]:
            if args.survive:
                runs.append(survive.run_with_faults(seed, Path(folder)))
                print(survive.format_run(seed, runs[-1]), flush=True)
            else:
                runs.append(run_with_faults(seed, Path(folder), args.stages))
                print(format_run(seed, runs[-1]), flush=True)
            report = survive.format_report(runs) if args.survive else format_report(runs)
            if args.report:  # after each run, since a campaign may be ended
                args.report.write_text(report + "\n")
            if len(runs) == args.runs or (not args.runs and sum(len(run.faults) for run in runs) >= CAMPAIGN_FAULTS):
                break
    print(report)
    return int(any(run.failure for run in runs))


if __name__ == "__main__":
    sys.exit(main())
