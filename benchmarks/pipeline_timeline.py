"""Draws a pipeline's step and reports the bubble, the fraction of time in which stages are idle, from a run's traces.

    python -m benchmarks.pipeline_timeline runs/default --out timeline.png

The run needs distributed.pipeline_stages and trainer.profile_steps, and all ranks on one machine, whose clock they
share. Steps are counted from the start of that run. The ideal bubble is (S - 1) / (M + S - 1) with S stages and M
micro-batches, the minimum for 1F1B and GPipe (Huang et al., "GPipe", 2019).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mingpt.utils.errors import UserError
from mingpt.utils.logging import run_script

COLORS = {"forward": "tab:blue", "loss": "tab:green", "backward": "tab:orange"}


@dataclass(frozen=True)
class Span:
    """The time that a stage spends on a micro-batch.

    Args:
        kind: forward, loss or backward
        micro_batch: its number, from 0
        start, end: seconds on the clock that all stages share
    """

    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """One step of one replica.

    Args:
        number: of the step
        stages: the spans of each stage, in order of time
    """

    number: int
    stages: list[list[Span]]

    @property
    def start(self) -> float:
        return min(span.start for stage in self.stages for span in stage)

    @property
    def end(self) -> float:
        return max(span.end for stage in self.stages for span in stage)

    @property
    def bubble(self) -> float:
        """The fraction of the stages' time from start to end in which they are idle."""
        busy = sum(span.end - span.start for stage in self.stages for span in stage)
        return 1 - busy / len(self.stages) / (self.end - self.start)

    @property
    def ideal_bubble(self) -> float:
        """The bubble if all stages took equally long and communication took no time."""
        idle = len(self.stages) - 1
        return idle / (len({span.micro_batch for span in self.stages[0]}) + idle)

    def __str__(self) -> str:
        return f"step {self.number}: stages wait {self.bubble:.1%} of the time, at best {self.ideal_bubble:.1%}"


def traces_of(run_dir: Path) -> list[Path]:
    """The traces of a run's first replica, in the order of its stages.

    Raises:
        UserError: there are none.
    """
    config = run_dir / "config.yaml"
    stages = yaml.safe_load(config.read_text())["distributed"]["pipeline_stages"] if config.is_file() else 1
    files = [run_dir / f"trace-{rank}.json" for rank in range(stages)]
    missing = [file.name for file in files if not file.is_file()]
    if stages == 1 or missing:
        raise UserError(
            f"RUN: {run_dir} has no {', '.join(missing) or 'stages'}: train with --distributed.pipeline_stages 2 "
            "--trainer.profile_steps 3, or more of both"
        )
    return files


def steps(traces: Sequence[Path]) -> list[Step]:
    """The profiled steps of one replica, from the traces of its stages."""
    stages = [_read_spans(trace) for trace in traces]
    return [Step(number, [stage[number] for stage in stages]) for number in stages[0]]


def _read_spans(trace: Path) -> dict[int, list[Span]]:
    """The spans of each step of a rank."""
    events = json.loads(trace.read_text())["traceEvents"]
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    spans: dict[int, list[Span]] = {}
    for event in sorted(annotations, key=lambda event: event["ts"]):
        kind, _, number = event["name"].replace("ProfilerStep#", "step ").partition(" ")
        if kind == "step":
            current = spans[int(number) + 1] = []  # the profiler counts from 0
        elif kind in COLORS:
            current.append(Span(kind, int(number), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return spans


def draw(step: Step, file: Path) -> None:
    """Draws a row for each stage, with the numbers of the micro-batches.

    Raises:
        UserError: the file can't be written, or its suffix is not that of an image format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes long
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure = Figure(figsize=(9, 1.4 + 0.5 * len(step.stages)), dpi=100, layout="constrained")
    ax = figure.subplots()
    centered: dict[str, Any] = {"horizontalalignment": "center", "verticalalignment": "center"}
    for row, stage in enumerate(step.stages):
        for span in stage:
            left, width = 1e3 * (span.start - step.start), 1e3 * (span.end - span.start)
            ax.barh(row, width, left=left, color=COLORS[span.kind], edgecolor="white", height=0.8)
            if span.kind != "loss":
                ax.text(left + width / 2, row, str(span.micro_batch), color="white", clip_on=True, **centered)
    ax.set_yticks(range(len(step.stages)), [f"stage {number}" for number in range(len(step.stages))])
    ax.invert_yaxis()
    ax.set_xlabel("ms")
    ax.set_title(str(step), loc="left", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=color) for color in COLORS.values()]
    figure.legend(patches, list(COLORS), loc="outside upper right", ncols=3, frameon=False)
    try:
        figure.savefig(file)
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: unknown suffix
        raise UserError(f"--out: {file} can't be written: {error}") from error


def run(argv: Sequence[str]) -> None:
    """Draws the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (main.py's trainer.run_dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="image (default: timeline.png in the run folder)")
    args = parser.parse_args(argv)
    recorded, out = steps(traces_of(args.run)), args.out or args.run / "timeline.png"
    print(*recorded, sep="\n")
    typical = sorted(recorded, key=lambda step: step.bubble)[len(recorded) // 2]
    draw(typical, out)
    print(f"drawn: {out}, step {typical.number}", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(run))
