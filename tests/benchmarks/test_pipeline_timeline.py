"""The timeline of a pipeline: its bubble is computed correctly, and drawn."""

import json
import struct
from pathlib import Path

import pytest
from helpers import run_program

from benchmarks.pipeline_timeline import Span, Step, draw, steps, traces_of
from mingpt.utils.errors import UserError

# Forward takes 1 second and backward 2; two micro-batches on two stages, 1F1B.
IDEAL = [
    [("forward", 0, 0, 1), ("forward", 1, 1, 2), ("backward", 0, 4, 6), ("backward", 1, 7, 9)],
    [("forward", 0, 1, 2), ("backward", 0, 2, 4), ("forward", 1, 4, 5), ("backward", 1, 5, 7)],
]


def write_run(folder: Path, stages: int, starts: tuple[int, ...] = (0,)) -> Path:
    """A run folder with two traces, of steps that begin at these seconds, and of other events."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"distributed: {{pipeline_stages: {stages}}}")
    for rank, stage in enumerate(IDEAL):
        events: list[dict] = [{"name": "forward 0", "cat": "cpu_op", "ts": 0, "dur": 1}, {"ph": "M", "ts": 0}]
        for number, first in enumerate(starts, start=11):
            spans: list[tuple[str, float, float]] = [(f"ProfilerStep#{number}", first - 0.01, first + 9)]
            spans += [(f"{kind} {i}", first + start, first + end) for kind, i, start, end in stage]
            events += [
                {"cat": "user_annotation", "name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
                for name, start, end in spans
            ]
        (folder / f"trace-{rank}.json").write_text(json.dumps({"traceEvents": events[::-1]}))
    return folder


def test_equal_stages_have_the_ideal_bubble(tmp_path: Path) -> None:
    found = steps(traces_of(write_run(tmp_path / "run", 2, (100, 200))))
    assert [step.number for step in found] == [12, 13]  # as in metrics.jsonl, from 1
    for step in found:
        assert step.bubble == pytest.approx(step.ideal_bubble) == pytest.approx(1 / 3)
        assert step.stages[1][1].kind == "backward"
    assert (found[0].start, found[0].end) == (100, 109)


def test_idle_time_between_spans_is_part_of_the_bubble() -> None:
    first = [Span("forward", 0, 0, 1), Span("backward", 0, 5, 6)]
    second = [Span("forward", 0, 1, 2), Span("backward", 0, 4, 5)]
    step = Step(1, [first, second])
    assert step.bubble == pytest.approx(1 - 4 / 12)
    assert step.ideal_bubble == pytest.approx(1 / 2)


def test_the_command_prints_the_bubble_and_draws_an_image(tmp_path: Path) -> None:
    process = run_program("-m", "benchmarks.pipeline_timeline", str(write_run(tmp_path / "run", 2)))
    assert process.returncode == 0, process.stderr
    assert "step 12: stages wait 33.3% of the time, at best 33.3%\n" in process.stdout
    image = (tmp_path / "run/timeline.png").read_bytes()
    assert struct.unpack(">II", image[16:24]) == (900, 240)


@pytest.mark.parametrize(
    ("stages", "message"),
    [(1, "has no stages: train with --distributed.pipeline_stages 2"), (3, "has no trace-2.json: train with")],
)
def test_a_run_without_traces_is_refused(stages: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        traces_of(write_run(tmp_path / "run", stages))


def test_an_unknown_image_format_is_refused(tmp_path: Path) -> None:
    [step] = steps(traces_of(write_run(tmp_path / "run", 2)))
    with pytest.raises(UserError, match=r"--out: .*image.foo can't be written"):
        draw(step, tmp_path / "image.foo")
