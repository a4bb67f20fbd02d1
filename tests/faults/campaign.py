"""A campaign of random faults: real processes are killed, stopped and started again, and every run must end with the
bits of an undisturbed one.

    python -m tests.faults.campaign

A run is a function of its seed, except for the timing of the machine: `--seed 17 --runs 1` repeats one.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from mingpt.snapshot.folder import SnapshotFolder, expired_steps
from tests.faults.runs import Run, assert_same_run, send
from tests.helpers import prepare_text, run_args, train_run, write_text

KILL, KILL_LAUNCHER, KILL_ALL, TERM, TERM_ALL, PAUSE, STOP = (
    "SIGKILL of a rank",
    "SIGKILL of the launcher",
    "SIGKILL of launcher and ranks",
    "SIGTERM to the launcher",
    "SIGTERM to launcher and ranks",
    "SIGSTOP of a rank, brief",
    "SIGSTOP of a rank, lasting",
)
WEIGHTS = {KILL: 4, KILL_LAUNCHER: 2, KILL_ALL: 3, TERM: 1, TERM_ALL: 1, PAUSE: 1, STOP: 1}  # how often each is drawn
ENDING = (KILL_LAUNCHER, KILL_ALL, TERM, TERM_ALL)  # after these the same command is given again
MODES = ("one process", "ddp", "zero1", "zero2", "fsdp", "stages", "tree")  # of the runs, in turn
MIN_FAULTS, MAX_FAULTS = 10, 16  # of a run
STEPS = 800
MAX_LOST_SECONDS = 30.0  # of work, by a fault, on a machine that is busy; otherwise it is about half a second


class Plan(NamedTuple):
    """How a run trains.

    Args:
        mode: one of MODES
        options: options that determine its bits, by names such as trainer__max_steps
        world_sizes: number of ranks of each start, in turn
        uses_launcher: otherwise, a single process runs without torchrun
        save_every: trainer.save_every; often, it asks for none before the end
    """

    mode: str
    options: dict[str, Any]
    world_sizes: list[int]
    uses_launcher: bool
    save_every: int


def draw_plan(rng: random.Random, mode: str, steps: int) -> Plan:
    options = {"optimizer__name": rng.choice(["adamw", "muon"]), "trainer__precision": rng.choice(["fp32", "bf16"])}
    options |= {"trainer__max_steps": steps, "trainer__eval_every": 40, "distributed__timeout_seconds": 8}
    world_sizes = [rng.randint(2, 4)]
    uses_launcher = True
    if mode == "one process":
        world_sizes = [1]
        uses_launcher = rng.random() < 0.5
    elif mode == "tree":  # only its bits are the same for another number of ranks
        options |= {"distributed__reduction": "tree"}
        world_sizes = rng.sample(range(1, 5), 4)
    elif mode == "stages":
        options |= {"distributed__pipeline_stages": 2, "trainer__batch_size": 8}
        options |= {"distributed__strategy": rng.choice(["ddp", "zero1", "zero2", "fsdp"])}
        world_sizes = [2 * rng.randint(1, 2)]
    else:
        options |= {"distributed__strategy": mode}
    return Plan(mode, options, world_sizes, uses_launcher, rng.choice([10, 100, 10**6, 10**6]))


class Fault(NamedTuple):
    """A fault that has happened.

    Args:
        step: the newest one before it
        in_save: whether a snapshot was being written
    """

    kind: str
    step: int
    in_save: bool


class FaultyRun(Run):
    """A run that is started again after each fault.

    Attributes:
        faults: the faults so far
        failure: why the run is not as it should be, or empty
    """

    def __init__(self, plan: Plan, run_dir: Path, text: Path, rng: random.Random, max_faults: int) -> None:
        super().__init__(run_dir, run_args(run_dir, text, **plan.options, trainer__save_every=plan.save_every))
        self.plan = plan
        self.last_fault_step = plan.options["trainer__max_steps"] - 100
        self.most_faults = min(rng.randint(MIN_FAULTS, MAX_FAULTS), max_faults)
        self.rng = rng
        self.faults: list[Fault] = []
        self.failure = ""

    def launch(self) -> None:
        """Starts the run, and waits until it trains."""
        world_sizes, starts = self.plan.world_sizes, self.starts
        world_size = world_sizes[len(self.processes) % len(world_sizes)]
        self.is_single = world_size == 1 and not self.plan.uses_launcher
        if self.is_single:
            self.start()
        else:
            self.start_torchrun(world_size, "--max_restarts=20")
        self.wait_for_start(starts)

    def wait_for_start(self, starts: int) -> None:
        self.wait(lambda: self.update() > starts, f"start number {starts + 1}")

    def run(self) -> None:
        """Trains to the end, with faults up to the last 100 steps."""
        self.launch()
        while self.reached < self.last_fault_step and len(self.faults) < self.most_faults:
            self.inject()
            # The next save of save_every waits for the one that is being written.
            is_lost = self.lost_steps[-1] > 2 * self.plan.save_every or self.lost_seconds[-1] > MAX_LOST_SECONDS
            if is_lost:
                raise AssertionError(f"{self.faults[-1]}: {self.lost_steps[-1]} steps lost, {self.lost_seconds[-1]} s")
        self.wait(lambda: self.processes[-1].poll() is not None, "the end", may_exit=True)
        if status := self.processes[-1].returncode:
            raise AssertionError(f"exit status {status}\n{self.output()}")
        self.update()
        assert self.starts == 1 + sum(fault.kind != PAUSE for fault in self.faults), "a restart that no fault explains"
        left = SnapshotFolder(str(self.run_dir / "snapshots"))
        newest = left.load_newest()
        assert newest is not None
        steps = [*left.files()]
        expired = expired_steps(steps, self.plan.save_every, newest["best"]["step"], keep=3)
        assert not expired, f"{expired} of {steps} are left"

    def inject(self) -> None:
        """Causes a fault, and waits until the run has continued."""
        rng = self.rng
        # Always the same number of draws, so that the outcome of a fault does not change the next one.
        [kind] = rng.choices([*WEIGHTS], [*WEIGHTS.values()])
        target, index = self.reached + rng.randint(0, 60), rng.randrange(12)
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
        self.faults.append(Fault(kind, self.reached, in_save))
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


def run_with_faults(seed: int, folder: Path, steps: int = STEPS, max_faults: int = MAX_FAULTS) -> FaultyRun:
    """Runs the plan of a seed with all its faults; the folder keeps undisturbed runs for the next seeds.

    Odd seeds train on the text's characters in token files, which changes no bit.
    """
    text, run_dir, rng = write_text(folder / "text.txt"), folder / f"seed-{seed}", random.Random(seed)
    tokens = folder / "tokens"
    if not tokens.exists():
        prepare_text(text, tokens, "char")
    plan = draw_plan(rng, MODES[seed % len(MODES)], steps)
    world_size = 1 if plan.mode == "tree" else plan.world_sizes[0]
    name = "-".join(map(str, [world_size, *plan.options.values()]))
    rare = {"trainer__save_every": 10**6, "trainer__save_overhead": None}
    undisturbed = folder / name
    if not undisturbed.exists():
        train_run(undisturbed, text, world_size, **rare, **plan.options)
    with FaultyRun(plan, run_dir, tokens if seed % 2 else text, rng, max_faults) as run:
        try:
            run.run()
            assert_same_run(undisturbed, run_dir)
        except (AssertionError, OSError) as error:
            run.failure = f"{type(error).__name__}: {error}"
    return run


def format_run(seed: int, run: FaultyRun) -> str:
    options = ", ".join(map(str, [run.plan.mode, *run.plan.options.values(), f"save_every {run.plan.save_every}"]))
    options += f", {len(run.processes)} starts on {' or '.join(map(str, run.plan.world_sizes))} ranks"
    faults = ", ".join(f"{fault.kind} @{fault.step}{' while saving' * fault.in_save}" for fault in run.faults)
    outcome = f"DIFFERENT: {run.failure}" if run.failure else "equal"
    lost = f"{sum(run.lost_steps)} steps recomputed, of {sum(run.lost_seconds):.1f} seconds"
    return f"seed {seed}: {options}: {faults}: {lost}: {outcome}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Injects random faults into runs and compares where they end.")
    parser.add_argument("--runs", type=int, default=25, metavar="N", help="default: 25")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that all processes are ended
    runs: list[FaultyRun] = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for seed in range(args.seed, args.seed + args.runs):
            runs.append(run_with_faults(seed, Path(folder)))
            print(format_run(seed, runs[-1]), flush=True)
    faults = sum(len(run.faults) for run in runs)
    equal = sum(not run.failure for run in runs)
    print(f"{faults} faults: {equal} of {len(runs)} runs ended with the bits of an undisturbed run.")
    return int(any(run.failure for run in runs))


if __name__ == "__main__":
    sys.exit(main())
