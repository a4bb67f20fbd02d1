"""The interval between frequent snapshots. It follows from the measured cost of a save."""

import time
from collections import deque
from statistics import fmean, median

MIN_SECONDS = 1.0  # shortest interval, even if saves cost less
MIN_STEPS = 5  # number of steps to measure before the first snapshot


class SaveInterval:
    """Decides when a frequent snapshot is due, so that all of them together cost a given fraction of the time.

    The cost of a save is the time that training waits for the copy, plus the extra time of steps until the file is
    written. Both are measured. CheckFreq (Mohan et al., FAST 2021) adapts its interval in the same way.

    Args:
        overhead: fraction of the time that saves may cost; None: a snapshot is never due
    """

    def __init__(self, overhead: float | None) -> None:
        self.overhead = overhead
        self.saved_at = time.monotonic()
        self.costs: deque[float] = deque([0.0], maxlen=16)  # seconds, of the newest saves
        self.cost: float | None = None  # seconds so far of the current save; None: nothing is being saved
        self.step_seconds: deque[float] = deque(maxlen=64)  # of the newest steps during which nothing was saved
        self.has_idle_step = False  # whether there was such a step since the newest save

    def add_save(self, seconds: float) -> None:
        """Records that a save has begun after a step, and how long training has waited for it."""
        self.saved_at = time.monotonic()
        self.cost = seconds
        self.has_idle_step = False

    def add_step(self, seconds: float, is_writing: bool) -> None:
        """Records how long a step has taken, and whether a file is still being written at its end.

        The step of a save counts as a part of it: on a GPU it waits for all work, so the next steps wait for less.
        """
        if self.cost is None:
            self.step_seconds.append(seconds)
            self.has_idle_step = True
            return
        if self.step_seconds:
            self.cost += seconds - median(self.step_seconds)
        if not is_writing:
            self.costs.append(self.cost)
            self.cost = None

    def is_due(self) -> bool:
        # There must be a step between two saves, to measure the duration of steps without them.
        if self.overhead is None or not self.has_idle_step or len(self.step_seconds) < MIN_STEPS:
            return False
        interval = max(MIN_SECONDS, fmean(self.costs) / self.overhead)
        return time.monotonic() >= self.saved_at + interval
