"""Draws docs/killed_twice.png and docs/killed_fifty_times.png: runs that were killed, over undisturbed ones.

    python -m docs.killed
    python -m docs.killed --ranks 1
    python -m docs.killed --every 30

The first is killed on four processes and on two, and ends on one. Of the second, with the default configuration under
`torchrun --max_restarts=50`, one of two processes is killed fifty times. With --ranks, only the second is trained, and
nothing is drawn. With --every, it is the share of an undisturbed run's steps that a run completes in two minutes if it
is killed at this interval in seconds. All are trained in runs/, which takes minutes on two cores.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from plot import draw, read_rows
from tests.faults.runs import Run, assert_same_run, send
from tests.helpers import ROOT

TREE = """--trainer.max_steps 400 --trainer.save_every 50 --trainer.log_every 10 --trainer.eval_every 50
    --trainer.sample_every null --trainer.micro_batch_size 3 --distributed.reduction tree"""
KILLS_TWICE = {4: 160, 2: 310}  # number of processes -> last step before the kill
STEPS_FIFTY, KILLS = 1600, 50
SHARE_SECONDS = 120.0


def new_run(name: str, options: str) -> Run:
    run_dir = ROOT / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(exist_ok=True)
    return Run(run_dir, ["--trainer.run_dir", str(run_dir), *options.split()])


def kill_twice(run: Run) -> None:
    for world_size, step in KILLS_TWICE.items():
        run.start_torchrun(world_size)
        run.wait_for_step(step)
        run.kill()
    run.start()


def kill_fifty_times(run: Run, ranks: int) -> None:
    """Kills a random rank at random moments, and prints the lost work and time."""
    rng = random.Random(1)
    pauses = []
    run.start_torchrun(ranks, f"--max_restarts={KILLS}")
    for kill in range(KILLS):
        wait_for_training(run, starts=kill + 1)
        run.wait(lambda step=kill * STEPS_FIFTY // (KILLS + 5): run.update() and run.reached >= step, "the next kill")
        time.sleep(rng.uniform(0, 1))
        send(rng.choice(run.ranks()), signal.SIGKILL)
        killed_at = time.time()
        run.update()
        wait_for_training(run, starts=kill + 2)
        pauses.append(first_step_time(run) - killed_at)
    print_costs("work lost", run.lost_seconds[1:])
    print_costs("from a kill to the next finished step", pauses)


def wait_for_training(run: Run, starts: int) -> None:
    """Waits for the first step of a start."""
    run.wait(
        lambda: run.update() >= starts and max(run.step_times.values(), default=0.0) > run.started_at,
        f"a step of start {starts}",
    )


def first_step_time(run: Run) -> float:
    """When the first step since the newest start was finished."""
    return min(seconds for seconds in run.step_times.values() if seconds > run.started_at)


def count_steps(ranks: int, options: str, kill_times: Sequence[float]) -> int:
    """The steps that a run completes in SHARE_SECONDS after its first one, if a rank is killed at these times."""
    with new_run("share", f"--trainer.max_steps 1000000 --trainer.log_every 1 {options}") as run:
        run.start_torchrun(ranks, "--max_restarts=100")
        wait_for_training(run, starts=1)
        began = first_step_time(run)
        for i, seconds in enumerate(kill_times):
            time.sleep(max(0.0, began + seconds - time.time()))
            send(run.ranks()[i % ranks], signal.SIGKILL)
        time.sleep(max(0.0, began + SHARE_SECONDS - time.time()))
        return max(row["step"] for row in run.rows("train") if row["time"] <= began + SHARE_SECONDS)


def print_share(ranks: int, options: str, every: float) -> None:
    kill_times = [(i + 0.5) * every for i in range(int(SHARE_SECONDS // every))]
    undisturbed = count_steps(ranks, options, [])
    killed = count_steps(ranks, options, kill_times)
    print(f"{len(kill_times)} kills: {killed} of {undisturbed} steps, {killed / undisturbed:.3f}")


def print_costs(name: str, seconds: list[float]) -> None:
    median = statistics.median(seconds)
    print(f"{name}, in seconds: median {median:.2f}, largest {max(seconds):.2f}, in all {sum(seconds):.1f}")


def compare(undisturbed: Run, killed: Run) -> None:
    for run in (undisturbed, killed):
        assert run.processes[-1].wait() == 0, run.output()
    assert_same_run(undisturbed.run_dir, killed.run_dir)
    print(f"{killed.run_dir}: weights, optimizer state and losses are equal in {undisturbed.run_dir}")


def draw_pair(undisturbed: Run, killed: Run, file: Path) -> None:
    draw({"undisturbed": read_rows(undisturbed.run_dir), "killed": read_rows(killed.run_dir)}, file)
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares runs that were killed with undisturbed ones.")
    parser.add_argument("--ranks", type=int, metavar="N", help="only kill one of N processes fifty times")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="only print the share of steps that is left")
    parser.add_argument("--options", default="", help="options of main.py for that")
    args = parser.parse_args()
    os.chdir(ROOT)
    ranks = args.ranks or 2
    if args.every is not None:
        print_share(ranks, args.options, args.every)
        return
    fifty = f"--trainer.max_steps {STEPS_FIFTY} --trainer.log_every 1 --trainer.sample_every null {args.options}"
    with new_run("undisturbed_fifty", fifty) as undisturbed, new_run("killed_fifty", fifty) as killed:
        kill_fifty_times(killed, ranks)
        killed.wait(lambda: killed.processes[-1].poll() is not None, "the end", may_exit=True)
        undisturbed.start_torchrun(ranks)
        compare(undisturbed, killed)
        if args.ranks is None:
            draw_pair(undisturbed, killed, ROOT / "docs/killed_fifty_times.png")
    if args.ranks is not None:
        return
    with new_run("undisturbed_twice", TREE) as undisturbed, new_run("killed_twice", TREE) as killed:
        kill_twice(killed)
        undisturbed.start()
        compare(undisturbed, killed)
        draw_pair(undisturbed, killed, ROOT / "docs/killed_twice.png")


if __name__ == "__main__":
    main()
