"""A trace of a few steps, for https://ui.perfetto.dev, and a table of their operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, schedule

from mingpt.monitoring.logging import logger

SKIP_STEPS = 10  # steps until memory, caches and gradient buckets are stable


@contextmanager
def profile_steps(steps: int | None, trace: Path) -> Iterator[Callable[[], None]]:
    """Records a number of steps in Chrome's trace format (None: none). Yields a function to call after each step."""
    if steps is None:
        yield lambda: None
        return

    def write(profiler: profile) -> None:
        count = profiler.step_num - SKIP_STEPS - 1
        if count < 1:
            return
        profiler.export_chrome_trace(str(trace))
        averages = profiler.key_averages()
        device = "device" if any(event.self_device_time_total > 0 for event in averages) else "cpu"
        table = averages.table(f"self_{device}_time_total", row_limit=12, max_name_column_width=50)
        logger.info(f"{table}\n{count} steps in {trace}: open it at https://ui.perfetto.dev")

    plan = schedule(skip_first=SKIP_STEPS, wait=0, warmup=1, active=steps, repeat=1)
    with profile(schedule=plan, on_trace_ready=write) as profiler:
        yield profiler.step
    if profiler.step_num < SKIP_STEPS + 2:
        logger.info(f"trainer.profile_steps: the run ended before step {SKIP_STEPS + 2}, the first to be recorded")
