"""launch/slurm.sbatch with simulated SLURM commands: a failed job is requeued if it has made progress."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, clean_env

COMMANDS = {
    # Writes a step to the file METRICS, if it is set, and fails.
    "srun": 'test -z "$METRICS" || echo \'{"event": "train", "step": 1}\' >> "$METRICS"; exit 1',
    "scontrol": 'echo "$@" >> "$CALLS"; test "$2" != hostnames || echo node1',
}


@pytest.mark.parametrize(
    ("run_dir", "progress"),
    [("runs/try #2", True), pytest.param("2024-01-31", False, marks=pytest.mark.slow)],
)
def test_a_job_that_fails_is_requeued_if_it_has_made_progress(run_dir: str, progress: bool, tmp_path: Path) -> None:
    for name, script in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    metrics = tmp_path / run_dir / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"event": "start", "step": 0}\n')
    env = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_PER_TASK": "1"}
    (tmp_path / "main.py").symlink_to(ROOT / "main.py")
    done = subprocess.run(
        ["bash", str(ROOT / "launch/slurm.sbatch"), "--trainer.run_dir", run_dir],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_env(METRICS=str(metrics) if progress else "", **env),
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert ("requeue 7" in (tmp_path / "calls").read_text().splitlines()) == progress


def test_a_mistake_ends_the_job_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "main.py").symlink_to(ROOT / "main.py")
    command = ["bash", str(ROOT / "launch/slurm.sbatch"), "--trainer.max_step", "3"]
    env = clean_env(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", SLURM_JOB_ID="7")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: trainer.max_step ")
    assert len(done.stderr.splitlines()) == 1
