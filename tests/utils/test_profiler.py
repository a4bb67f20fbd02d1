"""The trace of a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import run_args, run_captured, run_ranks


def test_the_steps_asked_for_are_in_a_trace(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = run_args(run, text, trainer__max_steps=14, trainer__profile_steps=2)
    [(status, out, _)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 0
    events = json.loads((run / "trace-0.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#11", "ProfilerStep#12"}  # the profiler counts from 0
    assert {"aten::addmm", "aten::_fused_adamw_"} <= {event.get("name") for event in events}
    assert f"2 steps in {run}/trace-0.json" in out
    assert "aten::addmm" in out


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, 3])
def test_no_trace_where_none_was_asked_for_or_the_run_is_too_short(
    steps: int | None, text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = run_args(run, text, trainer__max_steps=11, trainer__profile_steps=steps)
    [(status, out, _)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 0
    assert not list(run.glob("trace*"))
    assert ("the run was over before step 12" in out) == bool(steps)
