"""Draws docs/killed_fifty_times.png: a run of which fifty processes were killed, over an undisturbed one.

    python data/prepare.py && python -m tests.faults.killed_fifty_times

trains both in runs/, which takes minutes on two cores.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

from mingpt.monitoring.run_log import read_metrics
from plot import draw, read_run
from tests.helpers import ROOT, TORCHRUN, assert_equal_snapshots, wait_for_step

MAX_STEPS, KILLS, WORLD_SIZE = 600, 50, 4
OPTIONS = f"""--trainer.max_steps {MAX_STEPS} --trainer.log_every 1 --trainer.eval_every 50 --trainer.sample_every null
    --trainer.save_every 50 --trainer.micro_batch_size 3 --distributed.reduction tree"""
UNDISTURBED, KILLED = ROOT / "runs/undisturbed", ROOT / "runs/killed"


def members() -> list[int]:
    """Process ids of the ranks of the newest view, if it has finished a step."""
    rows, _ = read_metrics(KILLED / "metrics.jsonl")
    newest = [row for row in rows if row["event"] == "view"][-1]
    if not any(row["event"] == "train" and row["view"] == newest["view"] for row in rows):
        return []
    return [int(name.split(":")[1].split("/")[0]) for name in newest["members"]]


def main() -> None:
    os.chdir(ROOT)
    argv = [*OPTIONS.split(), "--trainer.run_dir"]
    for run_dir in (UNDISTURBED, KILLED):
        shutil.rmtree(run_dir, ignore_errors=True)
    survive = [*argv, str(KILLED), "--distributed.survive", "true"]
    command = [sys.executable, *TORCHRUN, f"--nproc_per_node={WORLD_SIZE}", "main.py", *survive]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL):
        for kill in range(KILLS):
            wait_for_step(KILLED, (kill + 1) * MAX_STEPS // (KILLS + 5), timeout=600)
            while len(pids := members()) < 2:
                time.sleep(0.01)
            os.kill(pids[kill % len(pids)], signal.SIGKILL)
    subprocess.run([sys.executable, "main.py", *argv, str(UNDISTURBED)], check=True)
    rows, _ = read_metrics(KILLED / "metrics.jsonl")
    kills = {row["step"]: "" for row in rows if row["event"] == "view" and row["left"]}
    undisturbed = replace(read_run(UNDISTURBED), name="undisturbed")
    killed = replace(read_run(KILLED), name="killed", restarts=kills)
    runs = [undisturbed, killed]
    draw(runs, ROOT / "docs/killed_fifty_times.png")
    assert_equal_snapshots(UNDISTURBED, KILLED)
    losses = [run.curves["loss"] for run in runs]
    print(f"equal weights and optimizer state; equal losses: {losses[0] == losses[1]}")


if __name__ == "__main__":
    main()
