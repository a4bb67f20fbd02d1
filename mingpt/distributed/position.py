"""Finds the function and the line that a rank's main thread executes, for messages about hangs.

This adds no code to the training step. With each heartbeat, a thread reads the frames of the main thread.
"""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = f"{Path(__file__).parents[2]}/"
COLLECTIVES = f"{Path(__file__).parent}/"  # code of collectives; messages name its callers
MAX_LISTED = 8  # number of ranks or places in a message


class Position(NamedTuple):
    """The position of a rank."""

    place: str  # see `find_place`
    seconds: float  # how long the rank has been there


class PositionReader:
    """Reads the position of this process's main thread from another thread.

    After an error in a collective, the position stays at that collective.
    """

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.last = (0, "no line yet")
        self.changed = time.monotonic()

    def read(self, step: int) -> Position:
        """Returns the position.

        Args:
            step: a number that changes with each step, since the thread may be at the same line in each of them
        """
        handled = sys._current_exceptions().get(self.thread)  # type: ignore[arg-type]
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
        if not isinstance(error, RuntimeError):  # the class of all backends' errors
            current = (step, find_place(sys._current_frames().get(self.thread)))  # type: ignore[arg-type]
            if current != self.last:
                self.last = current
                self.changed = time.monotonic()
        return Position(self.last[1], time.monotonic() - self.changed)


def find_place(frame: FrameType | None) -> str:
    """Returns the function that a thread executes, and the line of this program that leads to it.

    For example, `all_to_all_single at mingpt/parallel/tree_reduction.py:96`.
    """
    function = "" if frame is None else frame.f_code.co_name
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and not file.startswith(COLLECTIVES) and "/site-packages/" not in file:
            return f"{function} at {file.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{function}, called by no line of this program"


def describe_positions(positions: Sequence[Position]) -> list[str]:
    """Returns a text for each place, with its ranks and the longest time that one of them has been there.

    Args:
        positions: the position of each rank
    """
    ranks: dict[str, list[int]] = {}
    for rank, position in enumerate(positions):
        ranks.setdefault(position.place, []).append(rank)
    texts = []
    for place, found in ranks.items():
        plural = "s" if len(found) > 1 else ""
        seconds = max(positions[rank].seconds for rank in found)
        texts.append(f"rank{plural} {format_list(list(map(str, found)), ', ')}: in {place} for {seconds:.1f} seconds")
    return texts


def format_list(items: Sequence[str], separator: str) -> str:
    """Joins the first MAX_LISTED items, and adds the number of the others."""
    shown = list(items[:MAX_LISTED])
    if len(items) > MAX_LISTED:
        shown.append(f"{len(items) - MAX_LISTED} others")
    return separator.join(shown)
