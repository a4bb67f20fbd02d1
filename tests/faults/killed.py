"""Draws docs/killed_twice.png and docs/killed_fifty_times.png: runs that were killed, over undisturbed ones.

    python data/prepare.py && python -m tests.faults.killed

The first is killed on four processes and on two, and ends on one. Of the second, with distributed.survive, fifty
processes are killed. All are trained in runs/, which takes minutes on two cores.
"""

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

from plot import draw, read_run
from tests.faults.campaign import read_pid
from tests.faults.runs import Run, assert_same_run, send
from tests.helpers import ROOT

KILLS_TWICE = {4: 160, 2: 310}  # number of processes -> step after which they are killed
STEPS_TWICE, STEPS_FIFTY, KILLS = 400, 600, 50


def new_run(name: str, steps: int, log_every: int, survive: bool = False) -> Run:
    run_dir = ROOT / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(exist_ok=True)
    options = f"""--trainer.run_dir {run_dir} --trainer.max_steps {steps} --trainer.log_every {log_every}
        --trainer.eval_every 50 --trainer.sample_every null --trainer.save_every 50 --trainer.micro_batch_size 3
        --distributed.reduction tree --distributed.survive {str(survive).lower()}"""
    return Run(run_dir, options.split())


def kill_twice(run: Run) -> None:
    for world_size, step in KILLS_TWICE.items():
        run.start_torchrun(world_size)
        run.wait_for_step(step)
        run.kill()
    run.start()
    run.wait(lambda: run.step() == STEPS_TWICE, "the end", may_exit=True)


def kill_fifty_times(run: Run) -> None:
    run.start_torchrun(4)
    for kill in range(KILLS):
        run.wait_for_step((kill + 1) * STEPS_FIFTY // (KILLS + 5))
        while len(pids := newest_members(run)) < 2:
            time.sleep(0.01)
        send(pids[kill % len(pids)], signal.SIGKILL)
    run.wait(lambda: run.step() == STEPS_FIFTY, "the end", may_exit=True)


def newest_members(run: Run) -> list[int]:
    """Process ids of the ranks of the newest view, if it has finished a step."""
    newest = run.rows("view")[-1]
    has_trained = any(row["view"] == newest["view"] for row in run.rows("train"))
    return [read_pid(member) for member in newest["members"]] if has_trained else []


def draw_pair(undisturbed: Run, killed: Run, file: Path) -> None:
    for run in (undisturbed, killed):
        run.processes[-1].wait()
    assert_same_run(undisturbed.run_dir, killed.run_dir)
    metrics = replace(read_run(killed.run_dir), name="killed")
    if views := killed.rows("view"):
        metrics = replace(metrics, restarts={row["step"]: "" for row in views if row["left"]})
    draw([replace(read_run(undisturbed.run_dir), name="undisturbed"), metrics], file)
    print(f"{file}: equal weights, optimizer state and losses")


def main() -> None:
    os.chdir(ROOT)
    for name, kill in (("killed_twice", kill_twice), ("killed_fifty_times", kill_fifty_times)):
        steps, log_every = (STEPS_TWICE, 10) if kill is kill_twice else (STEPS_FIFTY, 1)
        undisturbed = new_run("undisturbed", steps, log_every)
        with undisturbed, new_run("killed", steps, log_every, survive=kill is kill_fifty_times) as killed:
            kill(killed)
            undisturbed.start()
            undisturbed.finish(timeout=1200)
            draw_pair(undisturbed, killed, ROOT / f"docs/{name}.png")


if __name__ == "__main__":
    main()
