"""The trace of a few steps."""

import json
from pathlib import Path

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg

from mingpt.monitoring.profiler import operations_table
from tests.helpers import run_args, run_captured, run_ranks


def test_the_requested_steps_are_in_the_trace_unless_the_run_is_too_short(text: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "short", tmp_path / "long"]
    argvs = [
        run_args(run, text, trainer__max_steps=steps, trainer__profile_steps=2)
        for run, steps in zip(runs, (11, 14), strict=True)
    ]
    [[(short_status, short_out, _), (status, out, _)]] = run_ranks(1, run_all, argvs, tmp_path=tmp_path)
    assert short_status == status == 0
    assert not list(runs[0].glob("trace*"))
    assert "the run ended before step 12, the first to be recorded" in short_out

    names = {str(event.get("name")) for event in json.loads((runs[1] / "trace-0.json").read_text())["traceEvents"]}
    # The profiler counts from 0.
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#11", "ProfilerStep#12"}
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
    assert f"2 steps in {runs[1]}/trace-0.json" in out
    assert "aten::mm" in out


def test_the_table_lists_what_took_longest_on_the_gpu_if_there_was_one() -> None:
    events = EventList()
    for name, cpu_time, device_time in (("launch", 90, 0), ("product", 5, 70), ("norm", 6, 20)):
        event = FunctionEventAvg()
        event.key, event.use_device, event.count, event.self_cpu_time_total = name, "cuda", 1, cpu_time
        event.self_device_time_total = event.device_time_total = device_time
        event.device_type, event.is_legacy = DeviceType.CPU, True  # so that no events of kernels are needed
        events.append(event)
    assert _first_rows(operations_table(events)) == ["product", "norm", "launch"]
    for event in events:
        event.self_device_time_total = event.device_time_total = 0
    assert _first_rows(operations_table(events)) == ["launch", "norm", "product"]


def _first_rows(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines() if line.split()[0] in ("launch", "product", "norm")]


def run_all(argvs: list[list[str]]) -> list[tuple[int, str, str]]:
    return [run_captured(*argv) for argv in argvs]
