"""Where does the time of a step go? A trace of a few steps, for https://ui.perfetto.dev, and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, schedule

from mingpt.utils.progress import Say

SKIP_STEPS = 10  # steps in which memory, caches and gradients' buckets settle


@contextmanager
def profile_steps(steps: int | None, trace: Path, say: Say) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after each step.

    Args:
        steps: how many are watched, once the first ones are over; None: none
        trace: file for the trace, in Chrome's format
        say: what tells the person watching, when it is written
    """
    if steps is None:
        yield lambda: None
        return

    def write(watched: profile) -> None:
        count = watched.step_num - SKIP_STEPS - 1
        if count < 1:
            say(f"trainer.profile_steps: the run was over before step {SKIP_STEPS + 2}, the first that is watched")
            return
        watched.export_chrome_trace(str(trace))
        table = watched.key_averages().table("self_cpu_time_total", row_limit=12, max_name_column_width=50)
        say(f"{table}\n{count} steps in {trace}: open it at https://ui.perfetto.dev")

    plan = schedule(skip_first=SKIP_STEPS, wait=0, warmup=1, active=steps, repeat=1)
    with profile(schedule=plan, on_trace_ready=write) as watched:
        yield watched.step
