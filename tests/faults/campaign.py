"""Does a run survive anything? Random faults on real processes; the end is compared with an undisturbed run's bits.

A run is a function of its seed but for the machine's timing: `python tests/faults/campaign.py --only 17` repeats one.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

sys.path.extend(str(folder) for folder in Path(__file__).parents[1:3])  # a script has no pytest to do so

from helpers import ROOT, assert_equal_snapshots, clean_env, loss_curve, run_args, write_text

KINDS = KILL, KILL_LAUNCHER, KILL_ALL, TERM, TERM_ALL, PAUSE, STOP = (
    "SIGKILL of a worker",
    "SIGKILL of the launcher",
    "SIGKILL of launcher and workers",
    "SIGTERM to the launcher",
    "SIGTERM to launcher and workers",
    "SIGSTOP of a worker, brief",
    "SIGSTOP of a worker, lasting",
)
FEWEST, MOST, ENOUGH = 4, 6, 200  # faults of a run, and of a whole campaign
STEPS = 400  # more than MOST faults use up, so that all of them come before the end
PATIENCE = 150  # seconds for what takes ten: to start, to stop, to get to a step


@dataclass(frozen=True)
class Plan:
    """What a run is made of. Each start of the launcher takes the next number of `processes`."""

    way: str  # tree, or a strategy
    optimizer: str
    processes: list[int]
    launcher: bool  # without one, a single process runs on its own
    save_every: int
    stages: int


def plan(draw: random.Random, stages: int) -> Plan:
    way, optimizer = draw.choice(["tree", "ddp", "zero1", "zero2", "fsdp"]), draw.choice(["adamw", "muon"])
    processes = [draw.randint(1, 4)]
    for _ in range(MOST):  # only the tree's bits are the same on another number
        others = [other for other in range(1, 5) if other != processes[-1]]
        processes.append(draw.choice(others) if way == "tree" else processes[-1])
    if stages > 1:  # with which the tree does not go
        way, processes = way.replace("tree", "ddp"), [stages * draw.randint(1, 2)] * len(processes)
    return Plan(way, optimizer, processes, draw.random() < 0.5, draw.choice([1, 2, 3, 5, 7, 10, 15, 20]), stages)


class Run:
    """The program at work, started again whenever a fault has ended it.

    Attributes: `struck` has kind, step and whether in a save of each fault that happened, `lost` the steps that each
    start had to do again, `failure` what went wrong.
    """

    def __init__(self, plan: Plan, run_dir: Path, text: Path) -> None:
        self.plan, self.run_dir = plan, run_dir
        key = "distributed__reduction" if plan.way == "tree" else "distributed__strategy"
        knobs: dict[str, Any] = {key: plan.way, "optimizer__name": plan.optimizer, "distributed__timeout_seconds": 8}
        knobs |= {"trainer__max_steps": STEPS, "trainer__save_every": plan.save_every, "trainer__eval_every": 40}
        if plan.stages > 1:
            knobs |= {"distributed__pipeline_stages": plan.stages, "trainer__batch_size": 8}
        self.argv = run_args(run_dir, text, **knobs)
        self.mark = f"CAMPAIGN_RUN={uuid.uuid4().hex}"  # by which even an orphan is found
        self.log = run_dir.with_suffix(".log").open("w")
        self.launches, self.starts, self.started, self.step = 0, 0, 0.0, 0
        self.struck: list[tuple[str, int, bool]] = []
        self.lost: list[int] = []
        self.failure, self.may_leave, self.done = "", False, False
        self.launch()

    def launch(self) -> None:
        number = self.plan.processes[self.launches]
        self.launches += 1
        self.bare = number == 1 and not self.plan.launcher
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}", "--max_restarts=20"]
        command = [sys.executable, *([] if self.bare else torchrun), str(ROOT / "main.py"), *self.argv]
        env = clean_env(**dict([self.mark.split("=")]))
        # A session of its own: Ctrl-C is for the campaign, which ends its processes itself.
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=env, start_new_session=True)

    def pids(self) -> dict[int, str]:
        """The living processes of this run, each with its local rank or none."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended since, or is another user's
                words = (folder / "environ").read_text(errors="replace").split("\0")
                if self.mark in words:
                    found[int(folder.name)] = next((word for word in words if word.startswith("LOCAL_RANK=")), "")
        return found

    def workers(self) -> list[int]:
        """The training processes by rank."""
        ranks = self.pids()
        return [self.process.pid] if self.bare else sorted(filter(ranks.get, ranks), key=ranks.__getitem__)

    def look(self) -> None:
        """Notes how far the run is and from where it went on, and starts it again when a fault has ended it."""
        status, lines = self.process.poll(), []  # status first: what it wrote before it left is then read
        with suppress(FileNotFoundError):
            lines = (self.run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-80:]
        for row in (json.loads(line) for line in lines if line.endswith(b"\n")):
            if row["event"] == "start" and row["time"] > self.started:
                self.started, self.starts = row["time"], self.starts + 1
                self.lost.append(self.step - row["step"])
                self.step = row["step"]
            elif row["event"] == "train":
                self.step = max(self.step, row["step"])
        if status == 0:
            self.done = True
        elif status is not None and not self.may_leave:
            raise AssertionError(f"the program left with status {status} at step {self.step}, which no fault explains")
        elif status is not None and not self.pids():
            self.may_leave = False
            self.launch()

    def wait(self, until: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until():
            if self.done or time.monotonic() > deadline:
                raise AssertionError(f"{what}: not {'before the end' if self.done else f'within {PATIENCE} s'}")
            time.sleep(0.01)
            self.look()

    def save_begins(self) -> bool:
        """Waits for a snapshot that is being written; without a pause, for that takes only milliseconds."""
        folder, deadline = self.run_dir / "snapshots", time.monotonic() + 3
        torn = set(folder.glob("*.tmp"))
        while time.monotonic() < deadline:
            if not torn.issuperset(folder.glob("*.tmp")):
                return True
        return False

    def strike(self, draw: random.Random) -> None:
        """Lets a fault happen, and waits until the run has gone on."""
        # Always equally many draws, so that chance in one fault does not decide the next.
        kind, target = draw.choices(KINDS, (3, 2, 2, 2, 2, 1, 2))[0], self.step + draw.randint(0, 25)
        aimed, chosen, wakes = draw.random() < 1 / 3, draw.randrange(12), draw.random() < 0.5
        delay, pause = draw.uniform(0, 0.04), draw.uniform(0.5, 1.5)
        self.wait(lambda: self.step >= target, f"step {target}")
        workers = self.workers()
        everyone = list({self.process.pid, *workers})
        # Only rank 0 writes: the others' death would leave its save whole.
        victim = workers[0 if aimed else chosen % len(workers)]
        inside = aimed and self.save_begins()
        time.sleep(0 if aimed else delay)
        starts = self.starts
        launcher = [self.process.pid]
        hit = {TERM: launcher, KILL_LAUNCHER: launcher, KILL_ALL: everyone, TERM_ALL: everyone}.get(kind, [victim])
        for pid in hit:
            os.kill(pid, signal.Signals[kind.split()[0]])
        self.may_leave = kind in (KILL_LAUNCHER, KILL_ALL, TERM, TERM_ALL) or (self.bare and kind != PAUSE)
        self.look()
        self.struck.append((kind, self.step, inside))
        if kind == STOP:
            self.wait(lambda: set(self.workers()) <= {victim}, "the other ranks give up")
        if kind in (PAUSE, STOP):
            time.sleep(pause)
            wakes = kind == PAUSE or (wakes and len(workers) > 1)
            os.kill(victim, signal.SIGCONT if wakes else signal.SIGKILL)
        if kind != PAUSE:
            self.wait(lambda: self.starts > starts, f"a start after {kind}")
        lost, every = self.lost[-1], self.plan.save_every
        if kind in (TERM, TERM_ALL) and lost:
            raise AssertionError(f"{kind}: {lost} steps lost, though it was told to save")
        if lost > 2 * every:  # the second save_every is for what was being written, which the next save waits for
            raise AssertionError(f"{kind}: {lost} steps lost, with save_every {every}")

    def close(self) -> None:
        """Ends all processes."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()
        self.log.close()


def undisturbed(plan: Plan, folder: Path, text: Path) -> Path:
    """The run folder of a run without faults whose bits a plan's run must reach; made once."""
    number = 1 if plan.way == "tree" else plan.processes[0]
    run_dir = folder / f"{plan.way}-{plan.optimizer}-{number}-{plan.stages}"
    if not run_dir.exists():
        alone = Plan(plan.way, plan.optimizer, [number], launcher=False, save_every=100, stages=plan.stages)
        with closing(Run(alone, run_dir, text)) as run:
            run.wait(lambda: run.done, "the end of the undisturbed run")
    return run_dir


def survive(seed: int, folder: Path, stages: int = 1) -> Run:
    """A seed's run with all its faults, to its end; undisturbed runs stay in the folder for the next seeds."""
    text, run_dir = write_text(folder / "text.txt"), folder / f"seed-{seed}"
    draw = random.Random(seed)
    planned = plan(draw, stages)
    whole = undisturbed(planned, folder, text)
    with closing(Run(planned, run_dir, text)) as run:
        try:
            run.wait(lambda: run.starts == 1, "the first start")
            for _ in range(draw.randint(FEWEST, MOST)):
                run.strike(draw)
            run.wait(lambda: run.done, "the end")
            assert_equal_snapshots(whole, run_dir)
            assert loss_curve(whole) == loss_curve(run_dir), "losses"
            assert run.starts == 1 + sum(kind != PAUSE for kind, *_ in run.struck), "a restart that no fault explains"
        except (AssertionError, ProcessLookupError) as error:
            output = run_dir.with_suffix(".log").read_text(errors="replace")
            run.failure = f"{type(error).__name__}: {error}\n{output[-6000:]}"
    shutil.rmtree(run_dir, ignore_errors=True)
    return run


def line(seed: int, run: Run) -> str:
    """What the person watching sees of a run."""
    numbers = ", ".join(f"{number}" for number in run.plan.processes[: run.launches])
    struck = ", ".join(f"{kind} @{step}{' in a save' * inside}" for kind, step, inside in run.struck)
    end = f"DIFFERENT: {run.failure}\nagain: python tests/faults/campaign.py --only {seed}" if run.failure else "equal"
    how = f"{run.plan.way}, {run.plan.optimizer}, save_every {run.plan.save_every}, processes {numbers}"
    how += " without launcher" * run.bare + f", {run.plan.stages} stages" * (run.plan.stages > 1)
    return f"seed {seed}: {how}: {struck}: {sum(run.lost)} steps recomputed: {end}"


def table(runs: Sequence[Run]) -> str:
    """The campaign's outcome in Markdown."""
    rows = ["| fault | happened | inside a save | recovered bit for bit |", "| --- | --- | --- | --- |"]
    struck = [(kind, inside, not run.failure) for run in runs for kind, _, inside in run.struck]
    for name, kinds in [*((kind, [kind]) for kind in KINDS), ("total", KINDS)]:
        of = [flags for kind, *flags in struck if kind in kinds]
        rows.append(f"| {name} | {len(of)} | {sum(inside for inside, _ in of)} | {sum(equal for _, equal in of)} |")
    most, beyond = zip(*((steps, steps - run.plan.save_every) for run in runs for steps in [0, *run.lost]), strict=True)
    rows += ["", f"{sum(not run.failure for run in runs)} of {len(runs)} runs ended in an undisturbed run's bits."]
    rows += [f"Most steps recomputed after a fault: {max(most)}; beyond save_every: {max(0, *beyond)}."]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturbs runs at random and compares where they end.")
    parser.add_argument("--runs", type=int, metavar="N", help=f"how many (default: until {ENOUGH} faults happened)")
    parser.add_argument("--only", type=int, metavar="SEED", help="this one alone")
    parser.add_argument("--stages", type=int, default=1, metavar="N", help="pipeline stages of all runs (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where the table is written, too")
    known = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that all processes are ended
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for seed in count() if known.only is None else [known.only]:
            runs.append(survive(seed, Path(folder), known.stages))
            print(line(seed, runs[-1]), flush=True)
            if len(runs) == known.runs or (not known.runs and sum(len(run.struck) for run in runs) >= ENOUGH):
                break
    print(table(runs))
    if known.report:
        known.report.write_text(table(runs) + "\n")
    return int(any(run.failure for run in runs))


if __name__ == "__main__":
    sys.exit(main())
