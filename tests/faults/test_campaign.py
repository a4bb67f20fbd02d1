"""Short campaigns of random faults; `python -m tests.faults.campaign` runs long ones."""

from pathlib import Path

import pytest

from tests.faults.campaign import MIN_FAULTS, run_with_faults


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stages"), [(2, 1), (8, 2)], ids=["tree", "stages"])
def test_random_faults_change_no_bit(seed: int, stages: int, tmp_path: Path) -> None:
    run = run_with_faults(seed, tmp_path, stages)
    assert not run.failure, run.failure
    assert len(run.faults) >= MIN_FAULTS


@pytest.mark.slow
def test_random_faults_lose_no_step_with_survive(tmp_path: Path) -> None:
    run = run_with_faults(5, tmp_path, survives=True, steps=400)
    assert not run.failure, run.failure
    assert len(run.faults) >= 2
