"""The position of each rank: the number of collectives that it has started, and the line that its main thread executes.

The step does not change. With each heartbeat, a thread reads the sequence numbers of the process groups and the frames
of the main thread.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from mingpt.monitoring.logging import logger

ROOT = f"{Path(__file__).parents[2]}/"
COLLECTIVES = (f"{Path(__file__).parent}/", dist.distributed_c10d.__file__)  # the code of collectives
TORCH_DISTRIBUTED = f"{Path(dist.__file__).parent}/"
SLOW_SECONDS = 4.0  # how long other ranks wait for a rank before a warning names it
POINT_TO_POINT = "point to point"  # description of groups with a different number of operations on each rank
MAX_LISTED = 8  # number of ranks or places in a message


class Position(NamedTuple):
    """The position of a rank."""

    counts: dict[str, int]  # process group -> number of collectives that the rank has started
    function: str  # the collective that its main thread is in; empty if none
    line: str  # file:line of this program that its main thread executes, or that has called the collective
    seconds: float  # since one of these changed


class PositionReader:
    """Reads the position of this process's main thread, for another thread.

    After an error in a collective, the position stays at that collective.
    """

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.last: tuple[dict[str, int], str, str] = {}, "", "no line yet"
        self.changed = time.monotonic()

    def read(self) -> Position:
        handled = sys._current_exceptions().get(self.thread)  # type: ignore[arg-type]
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
        if not isinstance(error, RuntimeError):  # the class of all backends' errors
            with suppress(RuntimeError):  # the main thread may be destroying a group, and the heartbeats must continue
                frame = sys._current_frames().get(self.thread)  # type: ignore[arg-type]
                function, line = find_line(frame)
                current = (count_collectives(), function, line)
                if current != self.last:
                    self.last = current
                    self.changed = time.monotonic()
        return Position(*self.last, time.monotonic() - self.changed)


def count_collectives() -> dict[str, int]:
    """Returns the number of collectives that this process has started, by process group and backend."""
    counts = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc != POINT_TO_POINT:
            for device in group._device_types:
                backend = group._get_backend(device)
                name = f"{group.group_name}/{backend.name()}"
                counts[name] = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts


def find_line(frame: FrameType | None) -> tuple[str, str]:
    """Returns the collective that a thread is in, and the line of this program that has called it.

    Outside collectives, it returns an empty string and the innermost line of this program.
    """
    function = ""
    is_collective = False
    while frame is not None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_name
        if file.startswith(COLLECTIVES):
            function = name
            is_collective = True
        elif file.startswith(ROOT) and "/site-packages/" not in file:
            return function, f"{file.removeprefix(ROOT)}:{frame.f_lineno}"
        elif file.startswith(TORCH_DISTRIBUTED) and not is_collective and not name.startswith("<"):
            function = function or name
        frame = frame.f_back
    return function, "no line of this program"


def find_late(positions: Sequence[Position]) -> dict[int, str]:
    """Returns the ranks that have not reached a collective that others have started, each with its process group."""
    most: Counter[str] = Counter()
    for position in positions:
        most |= Counter(position.counts)
    late = {}
    for rank in _not_waiting(positions):
        behind = [group for group, count in positions[rank].counts.items() if count < most[group]]
        if behind:
            late[rank] = behind[0]
    return late


def _not_waiting(positions: Sequence[Position]) -> list[int]:
    """Returns the ranks that are outside collectives, and not ahead of others in any process group."""
    least: dict[str, int] = {}
    for position in positions:
        for group, count in position.counts.items():
            least[group] = min(count, least.get(group, count))
    ranks = []
    for rank, position in enumerate(positions):
        is_ahead = any(count > least[group] for group, count in position.counts.items())
        if not position.function and not is_ahead:
            ranks.append(rank)
    return ranks


def explain_wait(positions: Sequence[Position], names: Sequence[str]) -> str:
    """Names the ranks that other ranks wait for, and the place of each rank.

    Args:
        positions: the position of each rank
        names: the name of each rank

    Returns:
        a text for a message; empty if all ranks are at the same place
    """
    late = find_late(positions)
    places: dict[tuple[str, str, bool], list[int]] = {}
    for rank, position in enumerate(positions):
        places.setdefault((position.function, position.line, rank in late), []).append(rank)
    if len(places) == 1:
        return ""
    named = _not_waiting(positions)
    what = "not answered"
    if late:
        named = list(late)
        what = f"not reached collective {positions[named[0]].counts[late[named[0]]] + 1:,}"
    elif not named or len(named) > len(positions) / 2:  # most ranks may be in backward, where DDP reduces gradients
        named = []
        what = "reached different collectives"
    each = [
        f"{format_ranks(ranks)}: {f'in {function} at ' if function else ''}{line} for "
        f"{max(positions[rank].seconds for rank in ranks):.1f} seconds"
        for (function, line, _), ranks in places.items()
    ]
    who = format_list([names[rank] for rank in named]) or "ranks"
    return f"{who} {'has' if len(named) == 1 else 'have'} {what}; {format_list(each, '; ')}"


def format_list(items: Sequence[str], separator: str = " and ") -> str:
    """Joins the first MAX_LISTED items, and adds the number of the others."""
    shown = list(items[:MAX_LISTED])
    if len(items) > MAX_LISTED:
        shown.append(f"{len(items) - MAX_LISTED} others")
    return separator.join(shown)


def format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {format_list(list(map(str, ranks)), ', ')}"


class SlowRanks:
    """Warns of ranks that other ranks wait for.

    It counts the time between calls instead of reading the clock, since this process may be stopped, too.
    """

    def __init__(self) -> None:
        self.behind: dict[int, tuple[dict[str, int], float]] = {}  # rank -> its counts, and how long it has been behind

    def look(self, positions: Sequence[Position], seconds: float) -> None:
        """Logs a warning when other ranks have waited for a rank for SLOW_SECONDS, once per wait.

        Args:
            positions: the position of each rank
            seconds: time since the previous call
        """
        before = self.behind
        self.behind = {}
        slow = []
        for rank in find_late(positions):
            position = positions[rank]
            counts, waited = before.get(rank, ({}, 0.0))
            now_waited = waited + seconds if counts == position.counts else 0.0
            self.behind[rank] = position.counts, now_waited
            if waited < SLOW_SECONDS <= now_waited:
                slow.append(f"rank {rank} is {now_waited:.1f} seconds behind the others, at {position.line}")
        if slow:
            # In a thread, because a write to a pipe that nobody reads blocks, and the caller must send heartbeats.
            threading.Thread(target=logger.warning, args=[format_list(slow, "; ")], daemon=True).start()
