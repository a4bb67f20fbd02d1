"""Where ranks are: how many collectives each has started, and which line its main thread executes.

The step is unchanged. With each heartbeat, a thread reads the sequence numbers of the process groups and the frames of
the main thread.
"""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from mingpt.monitoring.logging import logger

ROOT = f"{Path(__file__).parents[2]}/"
COLLECTIVES = (f"{Path(__file__).parent}/", dist.distributed_c10d.__file__)  # the code of collectives
TORCH_DISTRIBUTED = f"{Path(dist.__file__).parent}/"
SLOW_SECONDS = 4.0  # how long others wait for a rank before it is named
POINT_TO_POINT = "point to point"  # description of groups in which ranks start different numbers of operations
MAX_LISTED = 8  # ranks, or places where they are


class Position(NamedTuple):
    """The position of a rank."""

    counts: dict[str, int]  # collectives that it has started, by process group
    function: str  # the collective that its main thread is in; empty if none
    line: str  # file:line of this program that its main thread executes, or that has called the collective
    seconds: float  # since one of these changed


class PositionReader:
    """Reads the position of this process, for another thread than the main thread.

    Once a collective has failed, it stays the position of that collective.
    """

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.last: tuple[dict[str, int], str, str] = {}, "", "no line yet"
        self.changed = time.monotonic()

    def read(self) -> Position:
        handled = sys._current_exceptions().get(self.thread)  # type: ignore[arg-type]
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
        if not isinstance(error, RuntimeError):  # as all backends raise
            with suppress(RuntimeError):  # a group may be destroyed meanwhile, and the heartbeats must continue
                frame = sys._current_frames().get(self.thread)  # type: ignore[arg-type]
                function, line = find_line(frame)
                current = (count_collectives(), function, line)
                if current != self.last:
                    self.last = current
                    self.changed = time.monotonic()
        return Position(*self.last, time.monotonic() - self.changed)


def count_collectives() -> dict[str, int]:
    """Returns how many collectives this process has started, by process group and backend."""
    counts = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc != POINT_TO_POINT:
            for device in group._device_types:
                backend = group._get_backend(device)
                name = f"{group.group_name}/{backend.name()}"
                counts[name] = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts


def find_line(frame: FrameType | None) -> tuple[str, str]:
    """Returns the collective that this thread is in, and the line of this program that has called it.

    In no collective, it is an empty string and the innermost line of this program.
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


def find_late(positions: Mapping[int, Position]) -> dict[int, str]:
    """The ranks that have not reached a collective that others have started, each with its process group."""
    most: dict[str, int] = {}
    for position in positions.values():
        for group, count in position.counts.items():
            most[group] = max(count, most.get(group, 0))
    late = {}
    for rank in _not_waiting(positions):
        behind = [group for group, count in positions[rank].counts.items() if count < most[group]]
        if behind:
            late[rank] = behind[0]
    return late


def _not_waiting(positions: Mapping[int, Position]) -> list[int]:
    """The ranks that are in no collective, and not ahead of others in any process group."""
    least: dict[str, int] = {}
    for position in positions.values():
        for group, count in position.counts.items():
            least[group] = min(count, least.get(group, count))
    ranks = []
    for rank, position in positions.items():
        is_ahead = any(count > least[group] for group, count in position.counts.items())
        if not position.function and not is_ahead:
            ranks.append(rank)
    return ranks


def explain_wait(positions: Mapping[int, Position], names: Mapping[int, str]) -> str:
    """Says which rank has not reached a collective in which others wait, and where each rank is.

    Args:
        positions: those of all ranks
        names: what each is called

    Returns:
        an empty string if all ranks are at the same place
    """
    late = find_late(positions)
    places: dict[tuple[str, str, bool], list[int]] = {}
    for rank, position in positions.items():
        places.setdefault((position.function, position.line, rank in late), []).append(rank)
    if len(places) == 1:
        return ""
    outside = _not_waiting(positions)
    if late:
        named = list(late)
        group = next(iter(late.values()))
        members = [rank for rank, position in positions.items() if group in position.counts]
        newest = positions[max(members, key=lambda rank: positions[rank].counts[group])]
        function = f" ({newest.function})" if newest.function else ""
        what = f"not reached collective {positions[named[0]].counts[group] + 1:,}{function}"
    elif 0 < len(outside) <= len(positions) / 2:  # more of them are in backward, which calls DDP's
        named = outside
        what = "not answered"
    else:
        named = []
        what = "reached different collectives"
    if len(places) > MAX_LISTED:  # of the ranks that are named, if there are many
        places = dict(sorted(places.items(), key=lambda place: place[1][0] not in named))
    each = [
        f"{format_ranks(ranks)}: {f'in {function} at ' if function else ''}{line} for "
        f"{max(positions[rank].seconds for rank in ranks):.1f} seconds"
        for (function, line, _), ranks in places.items()
    ]
    who = format_list([names[rank] for rank in named]) or "ranks"
    return f"{who} {'has' if len(named) == 1 else 'have'} {what}; {format_list(each, '; ')}"


def format_list(items: Sequence[str], separator: str = " and ") -> str:
    """The first MAX_LISTED of them, and the number of the others."""
    shown = list(items[:MAX_LISTED])
    if len(items) > MAX_LISTED:
        shown.append(f"{len(items) - MAX_LISTED} others")
    return separator.join(shown)


def format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:MAX_LISTED]))
    return f"ranks {shown}{f' and {len(ranks) - MAX_LISTED} others' if len(ranks) > MAX_LISTED else ''}"


class SlowRanks:
    """Warns of ranks for which others have waited, from looks at their positions.

    It adds up the time between looks instead of reading the clock, since this process may be stopped, too.
    """

    def __init__(self) -> None:
        self.behind: dict[int, tuple[dict[str, int], float]] = {}  # rank -> its counts, and seconds behind

    def look(self, positions: Mapping[int, Position], seconds: float) -> None:
        """Logs a message that names the ranks that others have now waited for, once per wait.

        Args:
            positions: those of all ranks
            seconds: since the last look
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
            # The caller sends heartbeats, and a pipe or a terminal that nobody reads blocks the writer.
            threading.Thread(target=logger.warning, args=[format_list(slow, "; ")], daemon=True).start()
