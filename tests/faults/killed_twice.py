"""Draws docs/killed_twice.png: a run killed on four processes and on two, and ended on one, over one left alone.

    python data/prepare.py && python tests/faults/killed_twice.py

trains both in runs/ (minutes on two cores) and draws them with plot.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).parents[1:3])  # a script has no pytest to do so

from helpers import ROOT, clean_env

from mingpt.utils.metrics import read_metrics

KNOBS = {
    "trainer.max_steps": 400,
    "trainer.log_every": 10,
    "trainer.eval_every": 50,
    "trainer.sample_every": "null",
    "trainer.save_every": 50,
    "trainer.micro_batch_size": 3,
    "distributed.reduction": "tree",
}
KILLS = {4: 160, 2: 310}  # on so many processes, after this step
PATIENCE = 300  # seconds in which a start gets to its step


def begin(run_dir: Path, processes: int) -> subprocess.Popen:
    """Starts main.py under torchrun, or alone."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = [word for name, value in KNOBS.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *(torchrun if processes > 1 else []), "main.py", *words, "--trainer.run_dir", run_dir]
    return subprocess.Popen(command, cwd=ROOT, env=clean_env())


def kill(launcher: subprocess.Popen) -> None:
    """Kills a launcher and its workers, none of which can say a word any more."""
    workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for pid in (launcher.pid, *map(int, workers)):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def last_step(run_dir: Path) -> int:
    """The newest step in metrics.jsonl; 0 before there is one."""
    with suppress(FileNotFoundError):
        rows, _ = read_metrics(run_dir / "metrics.jsonl")
        return max((row["step"] for row in rows), default=0)
    return 0


def main() -> None:
    """Trains both runs and draws them."""
    undisturbed, killed = ROOT / "runs/undisturbed", ROOT / "runs/killed"
    for run_dir in (undisturbed, killed):
        shutil.rmtree(run_dir, ignore_errors=True)
    for processes, step in KILLS.items():
        launcher = begin(killed, processes)
        deadline = time.monotonic() + PATIENCE
        while last_step(killed) < step:
            if launcher.poll() is not None or time.monotonic() > deadline:
                launcher.terminate()
                sys.exit(f"{processes} processes did not get to step {step}")
            time.sleep(0.05)
        kill(launcher)
    for run_dir in (killed, undisturbed):
        if begin(run_dir, 1).wait():
            sys.exit(f"{run_dir} did not get to its end")
    subprocess.run(
        [sys.executable, "plot.py", "runs/undisturbed", "runs/killed", "--out", "docs/killed_twice.png"],
        cwd=ROOT,
        check=True,
    )


if __name__ == "__main__":
    main()
