"""Which other processes are alive: heartbeats in a key-value store, and connections that close with a process."""

import errno
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mingpt.distributed.heartbeat import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Heartbeats, decode_heartbeat
from mingpt.distributed.launch_environment import LOOPBACK
from mingpt.distributed.position import Position

WAITING_TIMEOUT = 1.0  # seconds after which a main thread that last said that it waits no longer does

Store = Any  # a dist.Store, whose type lacks clone and append (torch 2.13)


class Liveness:
    """This process's heartbeat, and a thread that watches the heartbeats of other processes and connections to them.

    Each process listens at a port and never accepts. The kernel completes connections to it, and closes them when the
    process ends in whatever way, so that those who watch it know at once. A stopped process, or a lost machine, closes
    nothing: its heartbeat stays the same.

    Attributes:
        names: the processes that this one watches, perhaps with itself

    Args:
        store: shared by all processes of the run
        name: of this process, unique in the store
        address: at which other processes reach this one, None if that is not known
        read_position: called by the thread for each heartbeat, which carries the result
        find_names: called by the thread before each look, for `names`
        on_look: called by the thread after each look, with the seconds since the last look
    """

    def __init__(
        self,
        store: Store,
        name: str,
        address: str | None,
        read_position: Callable[[], Position],
        find_names: Callable[[], Sequence[str]],
        on_look: Callable[[float], None],
    ) -> None:
        self.store = store
        self.name = name
        self.find_names = find_names
        self.on_look = on_look
        self.names: Sequence[str] = []
        self.waiting_until = 0.0  # until when the heartbeat says that the main thread waits to join
        self.selector = selectors.DefaultSelector()  # of open connections, with the names of the processes
        self.connections: dict[str, socket.socket] = {}
        self.closed: set[str] = set()  # names of processes whose connection has closed
        self.listener = socket.create_server((address or LOOPBACK, 0), backlog=1024)
        self.listener_host, port = self.listener.getsockname()
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
                self.names = self.find_names()
                others = [name for name in self.names if name != self.name and name not in self.closed]
                self.heartbeats.look(others, seconds)
                self._connect([name for name in others if name not in self.connections])
                self.on_look(seconds)
                for key, _ in self.selector.select(HEARTBEAT_INTERVAL):  # at its end: no process ever writes
                    connection = self.connections[key.data]
                    self.selector.unregister(connection)
                    self._close(key.data, connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self.selector.close()
        for connection in self.connections.values():
            connection.close()

    def _connect(self, names: Sequence[str]) -> None:
        """Connects to processes, and does not wait for hosts that do not answer."""
        if not names:
            return
        addresses = self.store.multi_get([f"address/{name}" for name in names])
        for name, encoded in zip(names, addresses, strict=True):
            address = json.loads(encoded)
            connection = socket.socket()
            connection.setblocking(False)
            self.connections[name] = connection
            error = connection.connect_ex(tuple(address)) if address else errno.EHOSTUNREACH
            if error in (0, errno.EINPROGRESS):
                self.selector.register(connection, selectors.EVENT_READ, name)
            else:
                self._close(name, error)

    def _close(self, name: str, error: int) -> None:
        """Closes a connection that was not established, or that has ended with its process."""
        self.connections[name].close()
        # Between machines a firewall may refuse a connection, and heartbeats alone decide.
        is_refused = error == errno.ECONNREFUSED and self.listener_host == LOOPBACK
        if error in (0, errno.ECONNRESET) or is_refused:
            self.closed.add(name)
