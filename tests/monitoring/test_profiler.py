"""The trace of a few steps."""

import json
from pathlib import Path

from tests.helpers import run_args, run_each_captured, run_ranks


def test_the_requested_steps_are_in_the_trace_unless_the_run_is_too_short(text: Path, tmp_path: Path) -> None:
    runs = {steps: tmp_path / str(steps) for steps in (5, 11, 14)}
    argvs = [run_args(run, text, trainer__max_steps=steps, trainer__profile_steps=2) for steps, run in runs.items()]
    [[*short, (status, out, _)]] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert status == 0
    for (short_status, short_out, _), steps in zip(short, (5, 11), strict=True):
        assert short_status == 0
        assert not list(runs[steps].glob("trace*"))
        assert "the run ended before step 12, the first to be recorded" in short_out

    names = {str(event.get("name")) for event in json.loads((runs[14] / "trace-0.json").read_text())["traceEvents"]}
    # The profiler counts from 0.
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#11", "ProfilerStep#12"}
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
    assert f"2 steps in {runs[14]}/trace-0.json" in out
    assert "aten::mm" in out
