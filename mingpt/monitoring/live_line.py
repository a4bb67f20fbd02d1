"""The live line on a terminal, and options of progress bars."""

import math
import os
import sys
import time
from threading import RLock
from typing import Any

from tqdm import tqdm

# Arguments of tqdm for a bar that appears on a terminal after a second and is removed at the end.
BAR_OPTIONS: dict[str, Any] = {"unit_scale": True, "delay": 1, "disable": None, "leave": False}

CELL_INTERVAL = 1.0  # seconds between updates in a notebook's cell, which keeps all output

# The default lock includes a semaphore of multiprocessing. Python 3.14 reports it as leaked after `exit_process`.
tqdm.set_lock(RLock())


def format_duration(seconds: float) -> str:
    """Formats seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LiveLine(tqdm):
    """The live line: steps, a bar in the remaining width, losses, speed, time left and the last snapshot's age.

    It follows the terminal's width. Training runs from `step` to `last_step`. `n` is the newest step.
    """

    is_active = False  # whether this process shows a live line

    def __init__(self, step: int, last_step: int, is_shown: bool) -> None:
        self.first_step = step
        self.last_step = last_step
        self.fields: dict[str, str] = {}  # texts by name: loss, val, speed
        self.started = time.monotonic()
        self.saved_at = math.inf
        LiveLine.is_active = is_shown
        super().__init__(
            total=last_step,
            initial=step,
            dynamic_ncols=True,
            bar_format="{n_fmt}/{total_fmt} {bar} {status}",
            file=sys.stdout,
            disable=not is_shown,
        )
        if "JPY_PARENT_PID" in os.environ:  # the `!` of a notebook, which has a terminal
            self.mininterval = CELL_INTERVAL

    def advance(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self.fields["loss"] = f"loss {loss:.3f}"
        self.update(step - self.n)
        self.n = step  # `update` does nothing if nothing is shown

    def show_save(self) -> None:
        """Shows that a snapshot has been saved now."""
        self.saved_at = time.monotonic()

    def time_left(self) -> str:
        """Returns the time until the last step at the average pace so far, including pauses."""
        pace = (time.monotonic() - self.started) / max(1, self.n - self.first_step)
        return format_duration(pace * (self.last_step - self.n))

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values for `bar_format`. tqdm reads them at each refresh."""
        values = super().format_dict
        fields = dict(self.fields)
        if self.n > self.first_step:
            fields["left"] = f"{self.time_left()} left"
        if (age := time.monotonic() - self.saved_at) >= 0:
            fields["saved"] = f"saved {format_duration(age)} ago"
        # The most important first, since tqdm cuts the line at the terminal's width.
        names = ("loss", "left", "val", "speed", "saved")
        return {**values, "status": " ".join(fields[name] for name in names if name in fields)}

    def close(self) -> None:
        """Ends the line and leaves it on the terminal."""
        LiveLine.is_active = False
        super().close()
