"""Short campaigns of random faults; `python -m tests.faults.campaign` runs long ones."""

from pathlib import Path

import pytest

from tests.faults.campaign import MIN_FAULTS, MODES, run_with_faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5, 6], ids=lambda seed: MODES[seed])
def test_random_faults_change_no_bit(seed: int, tmp_path: Path) -> None:
    run = run_with_faults(seed, tmp_path)
    assert not run.failure, run.failure
    assert len(run.faults) >= MIN_FAULTS
