"""Which stage is at work when: what stages wait is counted right, and drawn."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from helpers import run_program

from benchmarks.pipeline_timeline import Span, Step, steps, traces_of

# Forward takes 1 second and backward 2; two micro-batches on two stages, 1F1B.
IDEAL = [
    [("forward", 0, 0, 1), ("forward", 1, 1, 2), ("backward", 0, 4, 6), ("backward", 1, 7, 9)],
    [("forward", 0, 1, 2), ("backward", 0, 2, 4), ("forward", 1, 4, 5), ("backward", 1, 5, 7)],
]


def trace(file: Path, stage: list[tuple[str, int, int, int]], firsts: tuple[int, ...] = (0,)) -> Path:
    """A trace with a step that begins at each of these seconds, and what does not matter."""
    events: list[dict[str, Any]] = [{"name": "forward 0", "cat": "cpu_op", "ts": 0, "dur": 1}, {"ph": "M", "ts": 0}]
    for number, first in enumerate(firsts, start=11):
        spans: list[tuple[str, float, float]] = [(f"ProfilerStep#{number}", first - 0.01, first + 9)]
        spans += [(f"{kind} {i}", first + start, first + end) for kind, i, start, end in stage]
        events += [
            {"cat": "user_annotation", "name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
            for name, start, end in spans
        ]
    file.write_text(json.dumps({"traceEvents": events[::-1]}))
    return file


def run_of(folder: Path, stages: int, firsts: tuple[int, ...] = (0,)) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"distributed: {{pipeline_stages: {stages}}}")
    for rank, stage in enumerate(IDEAL):
        trace(folder / f"trace-{rank}.json", stage, firsts)
    return folder


def test_what_equal_stages_wait_is_the_formula(tmp_path: Path) -> None:
    found = steps(traces_of(run_of(tmp_path / "run", 2, (100, 200))))
    assert [step.number for step in found] == [12, 13]  # as metrics.jsonl counts, from 1
    for step in found:
        assert step.bubble == pytest.approx(step.least) == pytest.approx(1 / 3)
        assert step.stages[1][1].kind == "backward"
    assert (found[0].start, found[0].end) == (100, 109)
    assert str(found[0]) == "step 12: stages wait 33.3% of the time, at best 33.3%"


def test_a_stage_that_waits_longer_shows() -> None:
    late = [
        [Span("forward", 0, 0, 1), Span("backward", 0, 5, 6)],
        [Span("forward", 0, 1, 2), Span("backward", 0, 4, 5)],
    ]
    assert Step(1, late).bubble == pytest.approx(1 - 4 / 12)
    assert Step(1, late).least == pytest.approx(1 / 2)


def test_it_is_drawn(tmp_path: Path) -> None:
    done = run_program("-m", "benchmarks.pipeline_timeline", str(run_of(tmp_path / "run", 2)))
    assert done.returncode == 0, done.stderr
    assert "step 12: stages wait 33.3% of the time" in done.stdout
    picture = (tmp_path / "run/timeline.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (900, 240)


def test_a_run_must_be_named() -> None:
    done = run_program("-m", "benchmarks.pipeline_timeline")
    assert done.returncode == 2
    assert "the following arguments are required: RUN" in done.stderr


@pytest.mark.parametrize(
    ("stages", "out", "words"),
    [
        (1, None, "run has no stages: train with --distributed.pipeline_stages 2 --trainer.profile_steps 3"),
        (3, None, "run has no trace-2.json: train with"),
        (2, "picture.foo", "--out: picture.foo can't be written"),
    ],
)
def test_what_is_not_there_is_one_message(stages: int, out: str | None, words: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", stages)
    done = run_program("-m", "benchmarks.pipeline_timeline", str(run), *(["--out", out] if out else []), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
