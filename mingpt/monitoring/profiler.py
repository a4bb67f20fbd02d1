"""A trace of a few steps, for https://ui.perfetto.dev."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.profiler import profile, schedule

SKIP_STEPS = 10  # steps until memory, caches and gradient buckets are stable


def profiler(steps: int | None, trace: Path) -> AbstractContextManager[profile | None]:
    """Records a number of steps in Chrome's trace format, from step 12 on (None: none). Call `step` after each step."""
    if steps is None:
        return nullcontext()
    plan = schedule(skip_first=SKIP_STEPS, wait=0, warmup=1, active=steps, repeat=1)
    return profile(schedule=plan, on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)))
