"""The live line on a terminal, and options of progress bars."""

import math
import os
import sys
import time
from threading import RLock
from typing import Any

from tqdm import tqdm

# Arguments of tqdm for a bar on a terminal that appears after a second and is removed at the end.
BAR_OPTIONS: dict[str, Any] = {"unit_scale": True, "delay": 1, "disable": None, "leave": False}

CELL_INTERVAL = 1.0  # seconds between changes in a notebook's cell, which keeps all that it has shown

# By default also a semaphore of multiprocessing, which Python 3.14 reports as leaked, since `exit_process` cleans up
# nothing.
tqdm.set_lock(RLock())


def format_duration(seconds: float) -> str:
    """Formats seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LiveLine(tqdm):
    """The live line: steps, a bar in the width that is left, losses, speed, time left and the last snapshot's age.

    It follows the terminal's width. If stdout is no terminal, nothing is shown. Training runs from `step` to
    `last_step`. `n` is the newest step.
    """

    is_active = False  # whether this process shows one

    def __init__(self, step: int, last_step: int) -> None:
        self.first_step = step
        self.last_step = last_step
        self.fields: dict[str, str] = {}  # what is shown for "loss", "val", "evaluation" and "speed"
        self.started = time.monotonic()
        self.saved_at = math.inf
        self.evaluation_shown_at = time.monotonic()
        LiveLine.is_active = sys.stdout.isatty()
        super().__init__(
            total=last_step,
            initial=step,
            dynamic_ncols=True,
            bar_format="{n_fmt}/{total_fmt} {bar} {status}",
            file=sys.stdout,
            disable=not LiveLine.is_active,
        )
        if "JPY_PARENT_PID" in os.environ:  # a notebook's `!`, which has a terminal
            self.mininterval = CELL_INTERVAL

    def advance(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self.fields["loss"] = f"loss {loss:.3f}"
        self.update(step - self.n)
        self.n = step  # `update` does nothing where nothing is shown

    def show_evaluation(self, done: float | None) -> None:
        """Shows which part of an evaluation is done; None: it has ended."""
        if self.disable:
            return
        now = time.monotonic()
        if done is None:
            self.fields.pop("evaluation", None)
        elif now > self.evaluation_shown_at + self.mininterval:
            self.evaluation_shown_at = now
            self.fields["evaluation"] = f"evaluating {done:.0%}"
            self.refresh()

    def time_left(self) -> str:
        """Returns the time until the last step, at the average pace so far, pauses included."""
        pace = (time.monotonic() - self.started) / max(1, self.n - self.first_step)
        return format_duration(pace * (self.last_step - self.n))

    @property
    def format_dict(self) -> dict[str, Any]:
        """Values for `bar_format`, which tqdm reads at each refresh."""
        values = super().format_dict
        fields = dict(self.fields)
        if self.n > self.first_step:
            fields["left"] = f"{self.time_left()} left"
        if (age := time.monotonic() - self.saved_at) >= 0:
            fields["saved"] = f"saved {format_duration(age)} ago"
        bar = " "  # at least one column, between spaces
        width = len(f"{self.n}/{self.total} {bar}")
        shown = []
        # In this order, so that a narrow terminal shows what matters most, and no half of a field.
        for name in ("loss", "left", "val", "evaluation", "speed", "saved"):
            if name not in fields:
                continue
            width += 1 + len(fields[name])
            if values["ncols"] is not None and width > values["ncols"]:
                break
            shown.append(fields[name])
        return {**values, "status": " ".join(shown)}

    def close(self) -> None:
        """Leaves the line as it is."""
        LiveLine.is_active = False
        super().close()
