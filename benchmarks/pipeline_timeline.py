"""Which stage is at work when? A picture of a pipeline's step, and how long its stages wait, from a run's traces.

    python timeline.py runs/default --out timeline.png

The run must have been started with distributed.pipeline_stages and trainer.profile_steps, its ranks on one machine
with one clock; steps are counted from that start. What stages wait is beside (S - 1) / (M + S - 1), S stages and M
micro-batches, which no schedule of this kind goes below (Huang et al., "GPipe", 2019).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mingpt.utils.errors import UserError
from mingpt.utils.progress import run_script

COLORS = {"forward": "tab:blue", "loss": "tab:green", "backward": "tab:orange"}


@dataclass(frozen=True)
class Span:
    """What a stage does for a micro-batch.

    Args:
        kind: forward, loss or backward
        number: of the micro-batch, from 0
        start, end: seconds since some moment that all stages share
    """

    kind: str
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """One step of one replica.

    Args:
        number: of the step
        stages: what each does, in order of time
    """

    number: int
    stages: list[list[Span]]

    @property
    def start(self) -> float:
        """When the first stage begins."""
        return min(span.start for stage in self.stages for span in stage)

    @property
    def end(self) -> float:
        """When the last one is done."""
        return max(span.end for stage in self.stages for span in stage)

    @property
    def bubble(self) -> float:
        """The share of the stages' time from start to end in which they wait."""
        busy = sum(span.end - span.start for stage in self.stages for span in stage)
        return 1 - busy / len(self.stages) / (self.end - self.start)

    @property
    def least(self) -> float:
        """What it would be if all stages took equally long and nothing took time on its way."""
        idle = len(self.stages) - 1
        return idle / (len({span.number for span in self.stages[0]}) + idle)

    def __str__(self) -> str:
        return f"step {self.number}: stages wait {self.bubble:.1%} of the time, at best {self.least:.1%}"


def traces_of(run: Path) -> list[Path]:
    """The traces of a run's first replica, in the order of its stages.

    Raises:
        UserError: there are none.
    """
    config = run / "config.yaml"
    stages = yaml.safe_load(config.read_text())["distributed"]["pipeline_stages"] if config.is_file() else 1
    files = [run / f"trace-{rank}.json" for rank in range(stages)]
    missing = [file.name for file in files if not file.is_file()]
    if stages == 1 or missing:
        raise UserError(
            f"RUN: {run} has no {', '.join(missing) or 'stages'}: train with --distributed.pipeline_stages 2 "
            "--trainer.profile_steps 3, or more of both"
        )
    return files


def steps(traces: Sequence[Path]) -> list[Step]:
    """The profiled steps of one replica, from the traces of its stages."""
    stages = [_spans(trace) for trace in traces]
    return [Step(number, [stage[number] for stage in stages]) for number in stages[0]]


def _spans(trace: Path) -> dict[int, list[Span]]:
    """What a rank does in each step."""
    content = json.loads(trace.read_text())
    found = sorted(
        (event for event in content["traceEvents"] if event.get("cat") == "user_annotation"), key=lambda e: e["ts"]
    )
    spans: dict[int, list[Span]] = {}
    for event in found:
        kind, _, number = event["name"].replace("ProfilerStep#", "step ").partition(" ")
        if kind == "step":
            current = spans[int(number) + 1] = []  # the profiler counts from 0
        elif kind in COLORS:
            current.append(Span(kind, int(number), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return spans


def draw(step: Step, file: Path) -> None:
    """A row for each stage, the first on top, and in each the numbers of the micro-batches.

    Raises:
        UserError: the file can't be written, or its ending tells no format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only where something is drawn
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure = Figure(figsize=(9, 1.4 + 0.5 * len(step.stages)), dpi=100, layout="constrained")
    place = figure.subplots()
    for row, stage in enumerate(step.stages):
        for span in stage:
            left, width = 1e3 * (span.start - step.start), 1e3 * (span.end - span.start)
            place.barh(row, width, left=left, color=COLORS[span.kind], edgecolor="white", height=0.8)
            if span.kind != "loss":
                place.text(
                    left + width / 2, row, str(span.number), ha="center", va="center", color="white", clip_on=True
                )
    place.set_yticks(range(len(step.stages)), [f"stage {number}" for number in range(len(step.stages))])
    place.invert_yaxis()
    place.set_xlabel("ms")
    place.set_title(str(step), loc="left", fontsize="medium")
    place.spines[["top", "right"]].set_visible(False)
    figure.legend(
        [Patch(color=color) for color in COLORS.values()],
        list(COLORS),
        loc="outside upper right",
        ncols=3,
        frameon=False,
    )
    try:
        figure.savefig(file)
    except (OSError, RuntimeError, ValueError) as error:  # the last where the ending tells no format
        raise UserError(f"--out: {file} can't be written: {error}") from error


def run(argv: Sequence[str]) -> None:
    """Draws the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (main.py's trainer.run_dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: timeline.png in the run folder)")
    asked = parser.parse_args(argv)
    found, out = steps(traces_of(asked.run)), asked.out or asked.run / "timeline.png"
    print(*found, sep="\n")
    typical = sorted(found, key=lambda step: step.bubble)[len(found) // 2]
    draw(typical, out)
    print(f"drawn: {out}, step {typical.number}", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(run))
