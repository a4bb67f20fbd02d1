"""A short campaign of faults; `python tests/faults/campaign.py` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign import survive


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stages"), [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2)])
def test_what_a_fault_interrupts_ends_in_the_same_bits(seed: int, stages: int, folder: Path) -> None:
    run = survive(seed, folder, stages)
    assert not run.failure, run.failure
    assert len(run.struck) >= 4
