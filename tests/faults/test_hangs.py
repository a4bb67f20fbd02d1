"""A rank that hangs, that is slow, or that is in another collective is named, with its line."""

from pathlib import Path

import pytest

from tests.faults.hangs import HANG, MISMATCH, SLOW, Plan, run_with_fault


@pytest.mark.parametrize(
    "plan",
    [
        Plan(HANG, "at the end", "tree", 2, 0, 12, "tcp"),
        pytest.param(Plan(HANG, "in an evaluation", "tree", 2, 0, 4, "tcp"), marks=pytest.mark.slow),
        pytest.param(Plan(HANG, "before a step", "ddp", 3, 2, 4, "file"), marks=pytest.mark.slow),
        pytest.param(Plan(HANG, "in forward", "stages", 2, 0, 4, "file"), marks=pytest.mark.slow),
        pytest.param(Plan(HANG, "after the gradients", "zero2", 3, 1, 4, "tcp"), marks=pytest.mark.slow),
        pytest.param(Plan(MISMATCH, "in a save", "tree", 3, 1, 4, "file"), marks=pytest.mark.slow),
        pytest.param(Plan(SLOW, "in forward", "fsdp", 2, 1, 4, "tcp"), marks=pytest.mark.slow),
    ],
)
def test_a_rank_for_which_the_others_wait_is_named_with_its_line(plan: Plan, tmp_path: Path) -> None:
    assert run_with_fault(plan, tmp_path) == ""
