"""Which other processes are alive: heartbeats in a key-value store, and connections that close with a process."""

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mingpt.distributed.heartbeat import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Heartbeats, decode_heartbeat
from mingpt.distributed.launch_environment import LOOPBACK
from mingpt.distributed.position import Position

WAITING_TIMEOUT = 1.0  # seconds after which a main thread that last said that it waits no longer does
CONNECT_TIMEOUT = 0.5  # seconds

Store = Any  # a dist.Store, whose type lacks clone and append (torch 2.13)


class Liveness:
    """This process's heartbeat, and a thread that watches the heartbeats and connections of all other processes.

    Each process listens at a port and never accepts. The kernel completes connections to it, and closes them when the
    process ends in whatever way, so that the others know at once. A stopped process, or a lost machine, closes nothing:
    its heartbeat stays the same.

    Attributes:
        names: all processes of the run so far, in the order in which they started

    Args:
        store: shared by all processes of the run
        name: of this process, unique in the store
        address: at which other processes reach this one, None if that is not known
        read_position: called by the thread for each heartbeat, which carries the result
        on_look: called by the thread after each look, with the seconds since the last look
    """

    def __init__(
        self,
        store: Store,
        name: str,
        address: str | None,
        read_position: Callable[[], Position],
        on_look: Callable[[float], None],
    ) -> None:
        self.store = store
        self.name = name
        self.on_look = on_look
        self.names: list[str] = []
        self.waiting_until = 0.0  # until when the heartbeat says that the main thread waits to join
        self.connections: dict[str, socket.socket | None] = {}
        self.closed: set[str] = set()  # names of processes whose connection has closed
        self.listener = socket.create_server((address or LOOPBACK, 0), backlog=1024)
        port = self.listener.getsockname()[1]
        store.set(f"address/{name}", json.dumps([address, port] if address else None))
        self.heartbeats = Heartbeats(store, name, read_position)
        store.append("processes", f"{name} ")
        self.stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends the heartbeats and closes the listener, by which the others see at once that this process has left."""
        self.stopped = True
        self.listener.close()
        self.thread.join(HEARTBEAT_TIMEOUT)

    def set_waiting(self) -> None:
        """Declares that the main thread is waiting to join, for a second from now."""
        self.waiting_until = time.monotonic() + WAITING_TIMEOUT

    def is_dead(self, name: str, timeout: float = HEARTBEAT_TIMEOUT) -> bool:
        """Whether a process has ended, or sent no heartbeat for `timeout` seconds."""
        is_silent = self.heartbeats.silence.get(name, 0.0) > timeout
        return name != self.name and (name in self.closed or is_silent)

    def is_alive(self, name: str) -> bool:
        """Whether the heartbeat of a process has been seen to change, and not to stop."""
        return name in self.heartbeats.heard and not self.is_dead(name)

    def is_waiting(self, name: str) -> bool:
        """Whether a process is alive, and says that its main thread waits to join."""
        heartbeat = self.heartbeats.newest.get(name)
        if heartbeat is None or self.is_dead(name):
            return False
        return decode_heartbeat(heartbeat).is_waiting

    def _run(self) -> None:
        looked = time.monotonic()
        with suppress(RuntimeError, OSError):  # without a store, training continues while no process fails
            while not self.stopped:
                self.heartbeats.send(is_waiting=time.monotonic() < self.waiting_until)
                now = time.monotonic()
                seconds = min(now - looked, 2 * HEARTBEAT_INTERVAL)
                looked = now
                self.names = self.store.get("processes").decode().split()
                others = [name for name in self.names if name != self.name and name not in self.closed]
                self.heartbeats.look(others, seconds)
                for name in others:
                    if name not in self.connections:
                        self._connect(name)
                self.on_look(seconds)
                self._wait()
        for connection in filter(None, self.connections.values()):
            connection.close()

    def _connect(self, name: str) -> None:
        self.connections[name] = None
        address = json.loads(self.store.get(f"address/{name}"))
        try:
            self.connections[name] = address and socket.create_connection(address, CONNECT_TIMEOUT)
        except ConnectionRefusedError:
            if address[0] == LOOPBACK:  # elsewhere a firewall may refuse, and heartbeats alone decide
                self.closed.add(name)
        except OSError:
            pass

    def _wait(self) -> None:
        """Waits for the next look, or until a connection closes."""
        names = {connection: name for name, connection in self.connections.items() if connection}
        readable, _, _ = select.select(names, [], [], HEARTBEAT_INTERVAL)
        for connection in readable:  # at its end: no process ever writes
            self.closed.add(names[connection])
            self.connections[names[connection]] = None
            connection.close()
