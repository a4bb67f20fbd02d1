"""Random faults in runs with distributed.survive: every run must end in the bits of an undisturbed one, without the
loss of a finished step; only the loss of a supervisor or of the store's host ends it, and the same command resumes.

    python -m tests.faults.campaign --survive --runs 10 --report report.md
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import (
    ROOT,
    TORCHRUN,
    assert_equal_snapshots,
    clean_env,
    find_processes,
    kill_processes,
    run_args,
    write_text,
)

KINDS = KILL, KILL_RANK_0, KILL_TWO, KILL_AGAIN, KILL_SAVING, STOP, KILL_SUPERVISOR, KILL_LAUNCHER = (
    "SIGKILL of a rank",
    "SIGKILL of rank 0",
    "SIGKILL of two ranks at once",
    "SIGKILL of another rank while the others regroup",
    "SIGKILL of rank 0 in a save",
    "SIGSTOP of a rank",
    "SIGKILL of a supervisor",
    "SIGKILL of torchrun, which hosts the store",
)
WEIGHTS = (8, 4, 4, 4, 2, 6, 1, 1)
ENDING = (KILL_SUPERVISOR, KILL_LAUNCHER)  # faults after which the same command is given again
STEPS, TIMEOUT = 3000, 900


class Plan(NamedTuple):
    """The options of a run."""

    optimizer: str
    precision: str
    world_size: int
    save_every: int


def draw_plan(rng: random.Random) -> Plan:
    optimizer, world_size, save_every = rng.choice(["adamw", "muon"]), rng.randint(2, 4), rng.choice([5, 20, 50])
    return Plan(optimizer, rng.choice(["fp32", "bf16"]), world_size, save_every)


def options(plan: Plan, run_dir: Path, text: Path, steps: int, **changes: Any) -> list[str]:
    values = {"optimizer__name": plan.optimizer, "trainer__precision": plan.precision, "model__dropout": 0.1}
    values |= {"trainer__max_steps": steps, "trainer__eval_every": 20, "trainer__save_every": plan.save_every}
    values |= {
        "optimizer__decay_steps": STEPS,
        "trainer__micro_batch_size": 2,
        "trainer__batch_size": 9,
        "distributed__reduction": "tree",
    }
    return run_args(run_dir, text, **(values | changes))


def wait_for_save(run_dir: Path) -> bool:
    """Waits for a snapshot that is being written, without a pause, since that takes only milliseconds."""
    folder, deadline = run_dir / "snapshots", time.monotonic() + 3
    leftovers = set(folder.glob("*.tmp"))
    while time.monotonic() < deadline:
        if not leftovers.issuperset(folder.glob("*.tmp")):
            return True
    return False


class SurviveRun:
    """A run under torchrun, whose ranks are killed and stopped, but never all that have its state.

    Attributes:
        faults: kind, step and process ids of each
        reached: the step at each fault after which the run was started again
        stalls: seconds without a step after each fault, by the signal
        joins: seconds without a step where a rank has joined
        lost_steps: that were trained again after each start
        failure: why the run is not as it should be, or empty
    """

    def __init__(self, plan: Plan, run_dir: Path, text: Path, steps: int, seed: int) -> None:
        self.plan, self.run_dir, self.steps, self.rng = plan, run_dir, steps, random.Random(seed)
        self.variable = f"CAMPAIGN_RUN={uuid.uuid4().hex}"
        self.log = run_dir.with_suffix(".log")
        argv = options(plan, run_dir, text, steps, distributed__survive=True)
        self.command = [sys.executable, *TORCHRUN, f"--nproc_per_node={plan.world_size}", str(ROOT / "main.py"), *argv]
        self.faults: list[tuple[str, int, list[int]]] = []
        self.reached: list[int] = []
        self.killed: set[int] = set()
        self.stopped: dict[int, float] = {}  # process id -> when to continue it
        self.was_stopped: set[int] = set()
        self.stalls: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
        self.joins: list[float] = []
        self.lost_steps: list[int] = []
        self.failure = ""
        self.launch()

    def launch(self) -> None:
        env = clean_env(**dict([self.variable.split("=")]))
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=env, start_new_session=True)

    def rows(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = (self.run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith(b"\n")]
        return []

    def rows_since_start(self) -> list[dict[str, Any]]:
        """The rows since the newest start; none if it has not written one."""
        rows = self.rows()
        starts = [i for i, row in enumerate(rows) if row["event"] == "start"]
        return rows[starts[-1] :] if len(starts) == 1 + len(self.reached) else []

    def trainers(self) -> set[int]:
        """Process ids of the trainers that run, members or not."""
        return self.find_by("environ", "\0MINGPT_SUPERVISOR_PID=") - self.killed

    def find_by(self, file: str, text: str) -> set[int]:
        """Process ids of this run's processes with a text in a file of /proc."""
        found = set()
        for pid in find_processes(self.variable):
            with suppress(OSError):
                if text in Path(f"/proc/{pid}/{file}").read_text(errors="replace"):
                    found.add(pid)
        return found

    def holders(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Process ids of the members that surely have the state: those of the newest view that has finished a step."""
        views = {row["view"]: row["members"] for row in rows if row["event"] == "view"}
        members = views.get(max((row["view"] for row in rows if row["event"] == "train"), default=0), [])
        pids = [int(name.split(":")[1].split("/")[0]) for name in members]
        return [pid for pid in pids if pid not in self.killed and pid not in self.stopped]

    def run(self) -> None:
        """Injects faults until the last steps."""
        deadline = time.monotonic() + TIMEOUT
        due, is_ending = 0.0, False
        while self.process.poll() is None or is_ending:
            if time.monotonic() > deadline:
                raise AssertionError(f"not ended within {TIMEOUT} s")
            for pid, until in list(self.stopped.items()):
                if time.monotonic() > until:
                    self.send(pid, signal.SIGCONT)
                    del self.stopped[pid]
            time.sleep(0.02)
            if is_ending:
                if not find_processes(self.variable):
                    self.process.wait()
                    trained = [row["step"] for row in self.rows() if row["event"] == "train"]
                    self.reached.append(trained[-1])
                    self.launch()
                    is_ending = False
            elif time.monotonic() > due:
                rows = self.rows_since_start()
                step = max((row["step"] for row in rows if row["event"] == "train"), default=0)
                if 0 < step < self.steps - 100 and (holders := self.holders(rows)):
                    is_ending = self.inject(step, holders) in ENDING
                    due = time.monotonic() + self.rng.uniform(0.2, 2.0)

    def inject(self, step: int, holders: list[int]) -> str | None:
        """Causes a fault and returns its kind, if it is possible."""
        if len(holders) == 1 and self.rng.random() < 0.8:  # so that others can join
            return None
        [kind] = self.rng.choices(KINDS, WEIGHTS)
        rank0 = holders[0]
        safe = self.rng.choice(holders[1:] if kind in (KILL_RANK_0, KILL_SAVING) and len(holders) > 1 else holders)
        members = self.rng.random() < 0.8  # otherwise also those that start or wait to join
        victims = sorted((set(holders) if members else self.trainers()) - {safe} - set(self.stopped))
        self.rng.shuffle(victims)
        if kind in (KILL_RANK_0, KILL_SAVING):
            victims = [rank0] if rank0 != safe else []
        if kind == KILL_SUPERVISOR:
            victims = [self.rng.choice(sorted(self.find_by("cmdline", "/supervisor.py\0")))]
        if kind == KILL_LAUNCHER:
            victims = [self.process.pid]
        count = 2 if kind in (KILL_TWO, KILL_AGAIN) else 1
        if len(victims) < count:
            return None
        victims = victims[:count]
        if kind == KILL_SAVING and not wait_for_save(self.run_dir):
            return None
        if kind == STOP:
            self.stopped[victims[0]] = time.monotonic() + self.rng.uniform(0.3, 5)
            self.was_stopped.add(victims[0])
            self.send(victims[0], signal.SIGSTOP)
        else:
            for i, pid in enumerate(victims):
                if i and kind == KILL_AGAIN:
                    time.sleep(self.rng.uniform(0, 0.5))
                self.killed.add(pid)
                self.send(pid, signal.SIGKILL)
        self.faults.append((kind, step, victims))
        return kind

    def send(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def measure_stalls(self) -> None:
        last, change = 0.0, None
        for row in self.rows():
            if row["event"] == "start":
                last, change = 0.0, None
            elif row["event"] == "view" and row["view"] > 1:
                change = change or row
            elif row["event"] == "train":
                if change is not None and last:
                    pids = {int(name.split(":")[1].split("/")[0]) for name in change["left"]}
                    kind = "SIGSTOP" if pids & self.was_stopped else "SIGKILL" if pids & self.killed else ""
                    (self.stalls[kind] if kind else self.joins).append(row["time"] - last)
                last, change = row["time"], None

    def close(self) -> None:
        for pid in self.stopped:
            self.send(pid, signal.SIGCONT)
        kill_processes(self.variable)
        self.process.wait()


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What metrics.jsonl says of each step; the last one, at which every run evaluates, is left out."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] < rows[-1]["step"]]
    names = {"train": "loss", "eval": "val_loss", "sample": "text"}
    return {event: [(r["step"], r[key]) for r in rows if r["event"] == event] for event, key in names.items()}


def undisturbed_run(plan: Plan, folder: Path, text: Path, steps: int) -> Path:
    run_dir = folder / f"undisturbed-{plan.optimizer}-{plan.precision}-{steps}"
    if not run_dir.exists():
        argv = options(plan._replace(save_every=steps), run_dir, text, steps)
        subprocess.run([sys.executable, str(ROOT / "main.py"), *argv], env=clean_env(), check=True, capture_output=True)
    return run_dir


def run_with_faults(seed: int, folder: Path, steps: int = STEPS) -> SurviveRun:
    text, run_dir = write_text(folder / "text.txt"), folder / f"survive-{seed}"
    plan = draw_plan(random.Random(seed))
    undisturbed = undisturbed_run(plan, folder, text, steps)
    run = SurviveRun(plan, run_dir, text, steps, seed)
    try:
        run.run()
        assert run.process.returncode == 0, f"exit status {run.process.returncode}"
        assert_equal_snapshots(undisturbed, run_dir)
        assert curves(undisturbed) == curves(run_dir), "metrics"
        assert all(row["restart_count"] == 0 for row in run.rows() if row["event"] == "train"), "a restart"
        _, *starts = [row["step"] for row in run.rows() if row["event"] == "start"]
        assert len(starts) == len(run.reached), f"started from a snapshot: {starts}"
        run.lost_steps = [reached - start for reached, start in zip(run.reached, starts, strict=True)]
        assert all(lost <= 2 * plan.save_every for lost in run.lost_steps), f"{run.lost_steps} steps lost"
        run.measure_stalls()
    except (AssertionError, OSError) as error:
        run.failure = f"{type(error).__name__}: {error}\n{run.log.read_text(errors='replace')[-6000:]}"
    finally:
        run.close()
    if not run.failure:
        shutil.rmtree(run_dir, ignore_errors=True)
    return run


def format_run(seed: int, run: SurviveRun) -> str:
    counts = Counter(kind for kind, *_ in run.faults)
    parts = [
        f"seed {seed}",
        f"{run.plan.optimizer}, {run.plan.precision}, {run.plan.world_size} ranks, save_every {run.plan.save_every}",
    ]
    parts.append(", ".join(f"{count} x {kind}" for kind, count in counts.items()))
    for name, stalls in {**run.stalls, "joining": run.joins}.items():
        if stalls:
            parts.append(f"stall {name} median {statistics.median(stalls):.2f} s, largest {max(stalls):.2f}")
    return ": ".join([*parts, f"DIFFERENT: {run.failure}" if run.failure else "equal"])


def format_report(runs: Sequence[SurviveRun]) -> str:
    """Two tables in Markdown."""
    rows = ["| fault | number | recovered bit for bit |", "| --- | --- | --- |"]
    faults = [(kind, len(pids), not run.failure) for run in runs for kind, _, pids in run.faults]
    for name, kinds in [*((kind, [kind]) for kind in KINDS), ("total", KINDS)]:
        found = [(number, equal) for kind, number, equal in faults if kind in kinds]
        rows.append(f"| {name} | {len(found)} | {sum(equal for _, equal in found)} |")
    kills, stops = (sum(n for kind, n, _ in faults if (kind == STOP) == stop) for stop in (False, True))
    equal = sum(not run.failure for run in runs)
    rows += [
        "",
        f"{kills} processes were killed and {stops} stopped. {equal} of {len(runs)} runs ended with the bits of",
    ]
    rows += ["an undisturbed run, and wrote each row once."]
    if lost := [steps for run in runs for steps in run.lost_steps]:
        rows.append(f"The same command was given again {len(lost)} times, and repeated at most {max(lost)} steps.")
    rows += ["", "| seconds without a step | number | median | 95th percentile | largest |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for name in ("SIGKILL", "SIGSTOP", "joining"):
        stalls = sorted(s for run in runs for s in (run.joins if name == "joining" else run.stalls[name]))
        if stalls:
            high = stalls[int(0.95 * (len(stalls) - 1))]
            values = (statistics.median(stalls), high, stalls[-1])
            rows.append(f"| {name} | {len(stalls)} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(rows)
