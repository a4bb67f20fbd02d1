"""A short campaign of random faults; `python -m tests.faults.campaign` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaign import MIN_FAULTS, run_with_faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stages"), [(0, 1), (1, 1), (2, 1), (0, 2)])
def test_random_faults_change_no_bit(seed: int, stages: int, folder: Path) -> None:
    run = run_with_faults(seed, folder, stages)
    assert not run.failure, run.failure
    assert len(run.faults) >= MIN_FAULTS
