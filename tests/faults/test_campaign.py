"""A short campaign of random faults; `python -m tests.faults.campaign` runs a long one."""

from pathlib import Path

import pytest

from tests.faults.campaign import MIN_FAULTS, run_with_faults


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stages"), [(1, 1), (2, 1), (8, 2)])  # ddp; tree on 1 to 4 ranks; pipeline
def test_random_faults_change_no_bit(seed: int, stages: int, tmp_path: Path) -> None:
    run = run_with_faults(seed, tmp_path, stages)
    assert not run.failure, run.failure
    assert len(run.faults) >= MIN_FAULTS
