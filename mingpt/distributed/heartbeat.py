"""Heartbeats in a key-value store, by which processes see which others are alive, and where each of them is."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mingpt.distributed.position import Position

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats, and between looks at those of others
HEARTBEAT_TIMEOUT = 2.0  # seconds without one, after which a process counts as dead


class Heartbeat(NamedTuple):
    """What a process sets in the store at intervals."""

    number: int  # another one each time
    position: Position | None = None  # None: it has just started
    is_waiting: bool = False  # its main thread waits for the others

    def encode(self) -> str:
        return json.dumps(self)


def decode_heartbeat(heartbeat: bytes) -> Heartbeat:
    number, position, is_waiting = json.loads(heartbeat)
    return Heartbeat(number, position and Position(*position), is_waiting)


def heartbeat_key(name: str) -> str:
    return f"heartbeat/{name}"


class Heartbeats:
    """This process's heartbeat, and those of other processes as it has last seen them.

    Silence is counted in looks and not by the clock, because this process or the store may have been stopped meanwhile.

    Args:
        store: with a connection that only one thread uses
        name: of this process, unique in the store
        read_position: where the main thread is, for each heartbeat
    """

    def __init__(self, store: Any, name: str, read_position: Callable[[], Position]) -> None:
        self.store = store
        self.name = name
        self.read_position = read_position
        self.number = 0
        self.newest: dict[str, bytes] = {}  # by name
        self.silence: dict[str, float] = {}  # seconds without a new one, by name
        self.heard: set[str] = set()  # names of those that have been seen to change
        self.store.set(heartbeat_key(name), Heartbeat(0).encode())

    def send(self, is_waiting: bool = False) -> None:
        """Sets the next heartbeat of this process."""
        self.number += 1
        heartbeat = Heartbeat(self.number, self.read_position(), is_waiting).encode()
        self.store.set(heartbeat_key(self.name), heartbeat)
        self.newest[self.name] = heartbeat.encode()

    def look(self, names: Sequence[str], seconds: float) -> None:
        """Reads the heartbeats of other processes.

        Args:
            seconds: since the last look
        """
        others = [name for name in names if name != self.name]
        if not others:
            return
        heartbeats = self.store.multi_get([heartbeat_key(name) for name in others])
        for name, heartbeat in zip(others, heartbeats, strict=True):
            if heartbeat == self.newest.get(name):
                self.silence[name] += seconds
                continue
            self.silence[name] = 0.0
            if name in self.newest:
                self.heard.add(name)
            self.newest[name] = heartbeat

    def positions(self, names: Sequence[str]) -> dict[int, Position]:
        """Where the main threads of these processes are, by their index, as far as it is known."""
        return read_positions([self.newest.get(name) for name in names])


def read_positions(heartbeats: Sequence[bytes | None]) -> dict[int, Position]:
    """The positions in heartbeats, by their index. The first heartbeat of a process has none."""
    positions = {}
    for i, heartbeat in enumerate(heartbeats):
        position = None
        if heartbeat is not None:
            position = decode_heartbeat(heartbeat).position
        if position is not None:
            positions[i] = position
    return positions
