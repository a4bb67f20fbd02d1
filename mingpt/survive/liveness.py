"""Which other processes are alive: heartbeats in a key-value store, and connections that close with a process."""

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from mingpt.distributed.heartbeat import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Heartbeats, decode_heartbeat
from mingpt.distributed.launch_environment import LOOPBACK
from mingpt.distributed.position import Position

WAITING_TIMEOUT = 1.0  # seconds after which a main thread that last said that it waits no longer does
CONNECT_TIMEOUT = 0.5  # seconds


class Liveness:
    """This process's heartbeat, and a thread that looks at the heartbeats and connections of those that it watches.

    Each process listens at a port and never accepts. The kernel completes connections to it, and closes them when the
    process ends in whatever way, so that the others know at once. A stopped process, or a lost machine, closes nothing:
    its heartbeat stays the same.

    Args:
        store: with a connection that only this object uses
        name: of this process, unique in the store
        address: at which other processes reach this one, None if that is not known
        read_position: called by the thread for each heartbeat, which carries the result
        on_look: called by the thread after each look, with the store and the seconds since the last look
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        address: str | None,
        read_position: Callable[[], Position],
        on_look: Callable[[dist.Store, float], None],
    ) -> None:
        self.store = store
        self.name = name
        self.on_look = on_look
        self.watched: Sequence[str] = ()
        self.waiting_until = 0.0  # for which time the heartbeat says that the main thread waits for something
        self.connections: dict[str, socket.socket | None] = {}
        self.closed: set[str] = set()  # those whose connection has closed
        self.listener = socket.create_server((address or LOOPBACK, 0), backlog=1024)
        port = self.listener.getsockname()[1]
        self.store.set(f"address/{name}", json.dumps([address, port] if address else None))
        self.heartbeats = Heartbeats(store, name, read_position)
        self.wakeup, self.waker = socket.socketpair()
        self.wakeup.setblocking(False)
        self.waker.setblocking(False)
        self.stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Ends the heartbeats and closes the connections, by which the others see that this process has left."""
        self.stopped = True
        self.look_now()
        self.thread.join(HEARTBEAT_TIMEOUT)
        connections = [self.listener, *self.connections.values()]
        if not self.thread.is_alive():
            connections += [self.wakeup, self.waker]
        for connection in filter(None, connections):
            connection.close()

    def look_now(self) -> None:
        """Makes the thread look without waiting for the interval to end."""
        with suppress(OSError):  # it has been told already, or has stopped
            self.waker.send(b"x")

    def set_waiting(self) -> None:
        """Declares that the main thread is waiting, for a second from now."""
        self.waiting_until = time.monotonic() + WAITING_TIMEOUT

    def is_gone(self, name: str, timeout: float = HEARTBEAT_TIMEOUT) -> bool:
        """Whether a process has ended, or sent no heartbeat for `timeout` seconds."""
        is_silent = self.heartbeats.silence.get(name, 0.0) > timeout
        return name != self.name and (name in self.closed or is_silent)

    def is_alive(self, name: str) -> bool:
        """Whether the heartbeat of a process has been seen to change, and not to stop."""
        return name in self.heartbeats.heard and not self.is_gone(name)

    def is_waiting(self, name: str) -> bool:
        """Whether the main thread of a process that is alive says that it waits."""
        heartbeat = self.heartbeats.newest.get(name)
        if heartbeat is None or self.is_gone(name):
            return False
        return decode_heartbeat(heartbeat).is_waiting

    def _run(self) -> None:
        looked = time.monotonic()
        with suppress(RuntimeError, OSError):  # without a store, training goes on while nobody fails
            while not self.stopped:
                self.heartbeats.send(is_waiting=time.monotonic() < self.waiting_until)
                now = time.monotonic()
                seconds = min(now - looked, 2 * HEARTBEAT_INTERVAL)
                looked = now
                names = list(self.watched)
                self.heartbeats.look(names, seconds)
                for name in names:
                    if name != self.name and name not in self.connections:
                        self._connect(name)
                self.on_look(self.store, seconds)
                self._wait()

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
        connections = {name: self.connections.get(name) for name in self.watched if name not in self.closed}
        names = {connection: name for name, connection in connections.items() if connection}
        readable, _, _ = select.select([self.wakeup, *names], [], [], HEARTBEAT_INTERVAL)
        if self.wakeup in readable:
            self.wakeup.recv(1024)
        self.closed.update(names[connection] for connection in readable if connection in names)  # nobody ever writes
