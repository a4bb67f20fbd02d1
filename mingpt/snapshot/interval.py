"""The interval between frequent snapshots, from the measured cost of a save."""

import time
from collections import deque
from statistics import fmean, median

MIN_SECONDS = 1.0  # between snapshots, even if they cost less
MIN_STEPS = 5  # measured before the first snapshot


class SaveInterval:
    """Decides when a frequent snapshot is due, so that all of them together cost a given fraction of the time.

    A save costs the time that training waits for the copy, and the time by which steps are longer until the file is
    written. Both are measured. CheckFreq (Mohan et al., FAST 2021) adapts its interval in the same way.

    Args:
        overhead: fraction of the time that saves may cost; None: no snapshot is ever due
    """

    def __init__(self, overhead: float | None) -> None:
        self.overhead = overhead
        self.saved_at = time.monotonic()
        self.costs: deque[float] = deque([0.0], maxlen=16)  # seconds that each of the newest saves has cost
        self.cost: float | None = None  # of the save in progress; None: nothing is being saved
        self.step_seconds: deque[float] = deque(maxlen=64)  # of the newest steps in which nothing was saved
        self.has_idle_step = False  # since the newest save

    def add_save(self, seconds: float) -> None:
        """Records that a save has begun after a step, and that training has waited for it for so many seconds."""
        self.saved_at = time.monotonic()
        self.cost = seconds
        self.has_idle_step = False

    def add_step(self, seconds: float, is_writing: bool) -> None:
        """Records how long a step has taken, and whether a file is still being written at its end.

        The step before a save counts as a part of it: on a GPU it waits for all work, so the next ones wait for less.
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
        # Without a step between two saves, nothing would tell what a step takes without them.
        if self.overhead is None or not self.has_idle_step or len(self.step_seconds) < MIN_STEPS:
            return False
        interval = max(MIN_SECONDS, fmean(self.costs) / self.overhead)
        return time.monotonic() >= self.saved_at + interval
