"""Short campaigns of random faults; `python -m tests.faults.campaign` runs long ones."""

from pathlib import Path

import pytest

from tests.faults.campaign import run_with_faults

FAULTS, STEPS = 4, 450


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seed"), [("fsdp", 46), ("stages", 103), ("tree", 111)])
def test_random_faults_change_no_bit(mode: str, seed: int, tmp_path: Path) -> None:
    """These seeds have each kind of fault once or more, saves at two intervals, and both optimizers and precisions."""
    run = run_with_faults(seed, tmp_path, STEPS, FAULTS)
    assert run.plan.mode == mode
    assert not run.failure, run.failure
    assert len(run.faults) == FAULTS
