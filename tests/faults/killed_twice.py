"""Draws docs/killed_twice.png: a run killed on four processes and on two and ended on one, over an undisturbed one.

    python data/prepare.py && python -m tests.faults.killed_twice

trains both in runs/, which takes minutes on two cores.
"""

import os
import shutil
import signal
import subprocess
import sys

from tests.helpers import ROOT, TORCHRUN, start_main, wait_for_step, worker_pids

OPTIONS = """--trainer.max_steps 400 --trainer.log_every 10 --trainer.eval_every 50 --trainer.sample_every null
    --trainer.save_every 50 --trainer.micro_batch_size 3 --distributed.reduction tree"""
KILLS = {4: 160, 2: 310}  # number of processes -> step after which they are killed
UNDISTURBED, KILLED = ROOT / "runs/undisturbed", ROOT / "runs/killed"


def main() -> None:
    os.chdir(ROOT)
    argv = [*OPTIONS.split(), "--trainer.run_dir"]
    for run_dir in (UNDISTURBED, KILLED):
        shutil.rmtree(run_dir, ignore_errors=True)
    for world_size, step in KILLS.items():
        with start_main([*argv, str(KILLED)], *TORCHRUN, f"--nproc_per_node={world_size}") as launcher:
            wait_for_step(KILLED, step, timeout=600)
            for pid in (launcher.pid, *worker_pids(launcher.pid)):
                os.kill(pid, signal.SIGKILL)
    for run_dir in (KILLED, UNDISTURBED):
        subprocess.run([sys.executable, "main.py", *argv, str(run_dir)], check=True)
    names = [str(run_dir.relative_to(ROOT)) for run_dir in (UNDISTURBED, KILLED)]  # in the legend
    subprocess.run([sys.executable, "plot.py", *names, "--out", "docs/killed_twice.png"], check=True)


if __name__ == "__main__":
    main()
