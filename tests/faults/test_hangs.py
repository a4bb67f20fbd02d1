"""A rank that hangs, or that is in another collective, is named with its line."""

from pathlib import Path

import pytest

from tests.faults.hangs import Plan, run_with_fault


@pytest.mark.parametrize(
    "plan",
    [
        Plan(False, "at the end", "tree", 2, 0, 12, "tcp"),
        pytest.param(Plan(False, "in an evaluation", "tree", 2, 0, 4, "tcp"), marks=pytest.mark.slow),
        pytest.param(Plan(False, "before a step", "ddp", 3, 2, 4, "file"), marks=pytest.mark.slow),
        pytest.param(Plan(False, "in forward", "stages", 2, 0, 4, "file"), marks=pytest.mark.slow),
        pytest.param(Plan(False, "after the gradients", "zero2", 3, 1, 4, "tcp"), marks=pytest.mark.slow),
        pytest.param(Plan(True, "in a save", "tree", 3, 1, 4, "file"), marks=pytest.mark.slow),
    ],
)
def test_a_rank_for_which_the_others_wait_is_named_with_its_line(plan: Plan, tmp_path: Path) -> None:
    assert run_with_fault(plan, tmp_path) == ""
