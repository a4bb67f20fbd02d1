"""A campaign of random faults: real processes are killed, stopped and started again, and every run must end with the
bits of an undisturbed one.

    python -m tests.faults.campaign
    python -m tests.faults.campaign --survive --runs 10

With --survive, no finished step may be lost either, unless a fault ends the launcher or a supervisor. A run is a
function of its seed, except for the timing of the machine: `--seed 17 --runs 1` repeats one.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

from tests.faults.runs import Run, assert_same_run, send, train_undisturbed
from tests.helpers import run_args, write_text

KILL, KILL_RANK_0, KILL_TWO, KILL_AGAIN, KILL_SUPERVISOR, KILL_LAUNCHER, KILL_ALL, TERM, TERM_ALL, PAUSE, STOP = (
    "SIGKILL of a rank",
    "SIGKILL of rank 0",
    "SIGKILL of two ranks at once",
    "SIGKILL of another rank while the others regroup",
    "SIGKILL of a supervisor",
    "SIGKILL of the launcher",
    "SIGKILL of launcher and ranks",
    "SIGTERM to the launcher",
    "SIGTERM to launcher and ranks",
    "SIGSTOP of a rank, brief",
    "SIGSTOP of a rank, lasting",
)
# How often each fault is drawn.
RESTART_WEIGHTS = {KILL: 3, KILL_LAUNCHER: 2, KILL_ALL: 2, TERM: 2, TERM_ALL: 2, PAUSE: 1, STOP: 2}
SURVIVE_WEIGHTS = {KILL: 8, KILL_RANK_0: 6, KILL_TWO: 4, KILL_AGAIN: 4, STOP: 6, KILL_SUPERVISOR: 1, KILL_LAUNCHER: 1}
ENDING = (KILL_LAUNCHER, KILL_ALL, TERM, TERM_ALL, KILL_SUPERVISOR)  # after these the same command is given again
MIN_FAULTS, MAX_FAULTS, CAMPAIGN_FAULTS = 4, 6, 200  # of a run that is restarted, and of a campaign
STEPS, SURVIVE_STEPS = 400, 3000  # so many that all faults happen before the last 100


class Plan(NamedTuple):
    """How a run trains.

    Args:
        options: those that determine its bits, by names such as trainer__max_steps
        world_sizes: number of ranks of each start, in turn
        uses_launcher: otherwise, a single process runs without torchrun
        save_every: trainer.save_every
    """

    options: dict[str, Any]
    world_sizes: list[int]
    uses_launcher: bool
    save_every: int


def draw_plan(rng: random.Random, stages: int, survives: bool, steps: int) -> Plan:
    strategy = rng.choice(["tree", "ddp", "zero1", "zero2", "fsdp"])
    optimizer, precision = rng.choice(["adamw", "muon"]), rng.choice(["fp32", "bf16"])
    options = {"optimizer__name": optimizer, "trainer__precision": precision, "trainer__max_steps": steps}
    options |= {"trainer__eval_every": 40, "distributed__timeout_seconds": 8}
    if survives:
        return Plan(options | {"distributed__reduction": "tree"}, [rng.randint(2, 4)], True, rng.choice([5, 20, 50]))
    uses_launcher, save_every = rng.random() < 0.5, rng.choice([1, 2, 3, 5, 7, 10, 15, 20])
    if stages > 1:  # the tree does not go with stages
        options |= {"distributed__strategy": strategy.replace("tree", "ddp")}
        options |= {"distributed__pipeline_stages": stages, "trainer__batch_size": 8}
        return Plan(options, [stages * rng.randint(1, 2)], True, save_every)
    if strategy == "tree":  # only its bits are the same for another number of ranks
        return Plan(options | {"distributed__reduction": "tree"}, rng.sample(range(1, 5), 4), uses_launcher, save_every)
    return Plan(options | {"distributed__strategy": strategy}, [rng.randint(1, 4)], uses_launcher, save_every)


class Fault(NamedTuple):
    """A fault that has happened.

    Args:
        step: the newest one before it
        in_save: whether a snapshot was being written
        pids: the processes that were killed or stopped
    """

    kind: str
    step: int
    in_save: bool
    pids: list[int]


class FaultyRun(Run):
    """A run whose faults are followed by another start.

    Attributes:
        faults: those that have happened
        reached: the newest step
        starts: how often training has begun
        lost_steps: the steps that each start had to repeat
        failure: why the run is not as it should be, or empty
    """

    weights = RESTART_WEIGHTS
    survives = False

    def __init__(self, plan: Plan, run_dir: Path, text: Path, rng: random.Random) -> None:
        changes = {"trainer__save_every": plan.save_every, "distributed__survive": self.survives}
        super().__init__(run_dir, run_args(run_dir, text, **plan.options | changes))
        self.plan = plan
        self.last_fault_step = plan.options["trainer__max_steps"] - 100
        self.rng = rng
        self.faults: list[Fault] = []
        self.reached, self.starts, self.started_at = 0, 0, 0.0
        self.lost_steps: list[int] = []
        self.failure = ""

    def launch(self) -> None:
        """Starts the run, and waits until it trains."""
        world_sizes, starts = self.plan.world_sizes, self.starts
        world_size = world_sizes[len(self.processes) % len(world_sizes)]
        self.is_single = world_size == 1 and not self.plan.uses_launcher
        if self.is_single:
            self.start()
        else:
            options = [] if self.survives else ["--max_restarts=20"]
            self.start_torchrun(world_size, *options)
        self.wait_for_start(starts)

    def wait_for_start(self, starts: int) -> None:
        self.wait(lambda: self.update() > starts, f"start number {starts + 1}")

    def update(self) -> int:
        """Reads the progress of the run; returns how often training has begun."""
        for row in self.rows("start", "train"):
            if row["event"] == "train":
                self.reached = max(self.reached, row["step"])
            elif row["time"] > self.started_at:
                self.started_at, self.starts = row["time"], self.starts + 1
                self.lost_steps.append(self.reached - row["step"])
                self.reached = row["step"]
        return self.starts

    def run(self) -> None:
        """Trains to the end, with faults up to the last 100 steps."""
        self.launch()
        most = self.rng.randint(MIN_FAULTS, MAX_FAULTS)
        while self.reached < self.last_fault_step and (self.survives or len(self.faults) < most):
            self.inject()
            lost, save_every = self.lost_steps[-1], self.plan.save_every
            if lost > 2 * save_every:  # the next save waits for the one that is being written
                raise AssertionError(f"{self.faults[-1]}: {lost} steps lost, with save_every {save_every}")
        self.wait(lambda: self.processes[-1].poll() is not None, "the end", may_exit=True)
        if status := self.processes[-1].returncode:
            raise AssertionError(f"exit status {status}\n{self.output()}")
        self.update()
        restarts = len(self.processes) if self.survives else 1 + sum(f.kind != PAUSE for f in self.faults)
        assert self.starts == restarts, "a restart that no fault explains"

    def draw_kind(self) -> str:
        return self.rng.choices([*self.weights], [*self.weights.values()])[0]

    def inject(self) -> None:
        """Causes a fault, and waits until the run has continued."""
        rng = self.rng
        # Always the same number of draws, so that the outcome of a fault does not change the next one.
        kind, target, index = self.draw_kind(), self.reached + rng.randint(0, 25), rng.randrange(12)
        aims_at_save, wakes, delay, pause = rng.random() < 1 / 3, rng.random() < 0.5, rng.random() / 25, rng.random()
        self.wait(lambda: self.update() and self.reached >= target, f"step {target}")
        ranks, launcher, starts = self.ranks(), self.processes[-1].pid, self.starts
        victim = ranks[0 if aims_at_save else index % len(ranks)]  # rank 0 writes snapshots
        in_save = aims_at_save and self.wait_for_save()
        time.sleep(0 if aims_at_save else delay)
        everyone = list({launcher, *ranks})
        pids = {TERM: [launcher], KILL_LAUNCHER: [launcher], KILL_ALL: everyone, TERM_ALL: everyone}.get(kind, [victim])
        for pid in pids:
            send(pid, signal.Signals[kind.split()[0]])
        self.update()
        self.faults.append(Fault(kind, self.reached, in_save, pids))
        ends = kind in ENDING or (self.is_single and kind != PAUSE)
        if kind == STOP:
            self.wait(lambda: {*self.ranks()} <= {victim}, "exit of the other ranks")
        if kind in (PAUSE, STOP):
            time.sleep(0.5 + pause)
            wakes = kind == PAUSE or (wakes and len(ranks) > 1)
            send(victim, signal.SIGCONT if wakes else signal.SIGKILL)
        if ends:
            self.wait(lambda: self.update() and not self.pids(), "exit", may_exit=True)
            self.launch()
        elif kind != PAUSE:
            self.wait_for_start(starts)
        if kind in (TERM, TERM_ALL) and self.lost_steps[-1]:
            raise AssertionError(f"{kind}: {self.lost_steps[-1]} steps lost, although it saves")

    def stalls(self) -> dict[str, list[float]]:
        """Seconds without a step at the end of each view, by what has ended it."""
        last, view = 0.0, None
        stalls: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": [], "joining": []}
        signals = {pid: fault.kind.split()[0] for fault in self.faults for pid in fault.pids}
        for row in self.rows("view", "start", "train"):
            if row["event"] == "view":
                view = view or row
                continue
            if row["event"] == "train" and view and last:
                found = {signals[pid] for pid in map(read_pid, view["left"]) if pid in signals}
                stalls[max(found, default="joining")].append(row["time"] - last)
            last, view = row["time"] if row["event"] == "train" else 0.0, None
        return stalls


class SurvivingRun(FaultyRun):
    """A run with distributed.survive: ranks are killed and stopped, but never all that have its state."""

    weights = SURVIVE_WEIGHTS
    survives = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.killed: set[int] = set()
        self.stopped: set[int] = set()

    def holders(self) -> list[int]:
        """Process ids of the members that surely have the state: those of the newest view that has finished a step."""
        rows = [row for row in self.rows("view", "train") if row["time"] >= self.started_at]
        views = {row["view"]: row["members"] for row in rows if row["event"] == "view"}
        trained = [row["view"] for row in rows if row["event"] == "train"]
        members = map(read_pid, views[trained[-1]]) if trained else []
        return [pid for pid in members if pid not in self.killed | self.stopped]

    def inject(self) -> None:
        """Causes a fault if one is possible, and waits only if that ends the run."""
        rng = self.rng
        time.sleep(rng.uniform(0.2, 2.0))
        self.wait(lambda: bool(self.update() and self.holders()), "a step")
        holders = self.holders()
        if not holders or self.reached > self.last_fault_step or (len(holders) == 1 and rng.random() < 0.8):
            return  # so that others can join
        kind, aims_at_save = self.draw_kind(), rng.random() < 1 / 3
        in_save = kind == KILL_RANK_0 and aims_at_save and self.wait_for_save()
        safe = rng.choice(holders[1:] if kind == KILL_RANK_0 and len(holders) > 1 else holders)
        trainers = {pid for pid in self.pids() if has_supervisor(pid)}
        members = {*holders} if rng.random() < 0.8 else trainers  # or also those that start or wait to join
        victims = sorted(members - {safe} - self.stopped - self.killed)
        rng.shuffle(victims)
        if kind == KILL_RANK_0:
            victims = [pid for pid in holders[:1] if pid != safe]
        elif kind == KILL_SUPERVISOR:
            victims = sorted({pid for pid, rank in self.pids().items() if rank} - trainers)
        elif kind == KILL_LAUNCHER:
            victims = [self.processes[-1].pid]
        number = 2 if kind in (KILL_TWO, KILL_AGAIN) else 1
        if len(victims) < number:
            return
        victims = victims[:number]
        self.faults.append(Fault(kind, self.reached, in_save, victims))
        if kind == STOP:
            self.stopped.add(victims[0])
            send(victims[0], signal.SIGSTOP)
            Timer(rng.uniform(0.3, 5), self.wake, victims).start()
            return
        for i, pid in enumerate(victims):
            time.sleep(rng.uniform(0, 0.5) if i and kind == KILL_AGAIN else 0)
            self.killed.add(pid)
            send(pid, signal.SIGKILL)
        if kind in ENDING:
            self.wait(lambda: self.update() and not self.pids(), "exit", may_exit=True)
            self.launch()

    def wake(self, pid: int) -> None:
        send(pid, signal.SIGCONT)
        self.stopped.discard(pid)


def read_pid(member: str) -> int:
    """The process id in a member's name."""
    return int(member.split(":")[1].split("/", maxsplit=1)[0])


def has_supervisor(pid: int) -> bool:
    try:
        return "\0MINGPT_SUPERVISOR_TOKEN=" in Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:  # it has ended
        return False


def run_with_faults(
    seed: int, folder: Path, stages: int = 1, survives: bool = False, steps: int | None = None
) -> FaultyRun:
    """Runs the plan of a seed with all its faults; the folder keeps undisturbed runs for the next seeds."""
    text, run_dir, rng = write_text(folder / "text.txt"), folder / f"seed-{seed}", random.Random(seed)
    plan = draw_plan(rng, stages, survives, steps or (SURVIVE_STEPS if survives else STEPS))
    world_size = 1 if "distributed__reduction" in plan.options else plan.world_sizes[0]
    name = "-".join(map(str, [world_size, *plan.options.values()]))
    undisturbed = train_undisturbed(folder / name, text, world_size, trainer__save_every=10**6, **plan.options)
    with (SurvivingRun if survives else FaultyRun)(plan, run_dir, text, rng) as run:
        try:
            run.run()
            assert_same_run(undisturbed, run_dir)
            if survives:
                assert all(row["restart_count"] == 0 for row in run.rows("train")), "a restart"
        except (AssertionError, OSError) as error:
            run.failure = f"{type(error).__name__}: {error}"
    return run


def format_run(seed: int, run: FaultyRun) -> str:
    options = ", ".join(map(str, [*run.plan.options.values(), f"save_every {run.plan.save_every}"]))
    options += f", {len(run.processes)} starts on {' or '.join(map(str, run.plan.world_sizes))} ranks"
    faults = ", ".join(f"{fault.kind} @{fault.step}{' while saving' * fault.in_save}" for fault in run.faults)
    outcome = f"DIFFERENT: {run.failure}" if run.failure else "equal"
    return f"seed {seed}: {options}: {faults}: {sum(run.lost_steps)} steps recomputed: {outcome}"


def format_report(runs: Sequence[FaultyRun]) -> str:
    """Tables in Markdown."""
    rows = ["| fault | number | while saving | recovered bit for bit |", "| --- | --- | --- | --- |"]
    faults = [(fault, not run.failure) for run in runs for fault in run.faults]
    for kind in [*runs[0].weights, "total"]:
        found = [(fault.in_save, equal) for fault, equal in faults if kind in (fault.kind, "total")]
        in_saves, equals = sum(in_save for in_save, _ in found), sum(equal for _, equal in found)
        rows.append(f"| {kind} | {len(found)} | {in_saves} | {equals} |")
    equal = sum(not run.failure for run in runs)
    most = max((steps for run in runs for steps in run.lost_steps), default=0)
    rows += ["", f"{equal} of {len(runs)} runs ended with the bits of an undisturbed run."]
    rows += [f"Most steps recomputed after a fault: {most}.", ""]
    if runs[0].survives:
        rows += ["| seconds without a step | number | median | largest |", "| --- | --- | --- | --- |"]
        for name in ("SIGKILL", "SIGSTOP", "joining"):
            stalls = [stall for run in runs for stall in run.stalls()[name]]
            if stalls:
                rows.append(f"| {name} | {len(stalls)} | {statistics.median(stalls):.2f} | {max(stalls):.2f} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Injects random faults into runs and compares where they end.")
    parser.add_argument("--runs", type=int, metavar="N", help=f"default: until {CAMPAIGN_FAULTS} faults have happened")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")
    parser.add_argument("--stages", type=int, default=1, metavar="N", help="pipeline stages of all runs (default: 1)")
    parser.add_argument("--survive", action="store_true", help="runs with distributed.survive, which restart nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that all processes are ended
    runs: list[FaultyRun] = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for seed in count(args.seed):
            runs.append(run_with_faults(seed, Path(folder), args.stages, args.survive))
            print(format_run(seed, runs[-1]), flush=True)
            if len(runs) == args.runs or (not args.runs and sum(len(run.faults) for run in runs) >= CAMPAIGN_FAULTS):
                break
        print(format_report(runs))
    return int(any(run.failure for run in runs))


if __name__ == "__main__":
    sys.exit(main())
