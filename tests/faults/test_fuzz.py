"""Random input to the programs that people start; `python -m tests.faults.fuzz` tries more."""

import os

import pytest
from helpers import ROOT, run_program


@pytest.mark.parametrize(("seed", "runs"), [(3, 8), pytest.param(50_000, 150, marks=pytest.mark.slow)])
def test_random_input_ends_in_time_with_one_message_at_most(seed: int, runs: int) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    words = ("-m", "tests.faults.fuzz", "--seed", str(seed), "--runs", str(runs))
    done = run_program(*words, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"0 of {runs} inputs failed")
