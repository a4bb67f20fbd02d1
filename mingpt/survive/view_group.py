"""The gloo group of a view of the membership, with its collectives."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CONNECT_SECONDS = 10.0  # to form a group
GROUP_TIMEOUT = timedelta(seconds=30)  # of the thread that forms a group
COLLECTIVE_TIMEOUT = timedelta(days=1)  # members leave a collective when its view is over


class ViewGroup:
    """A group that is formed anew for each view.

    gloo can't abort (torch 2.13: `abort` does nothing), and the destructor of a group waits for its unfinished
    collectives. So an abandoned group is kept until they have ended.

    Args:
        store: shared by all processes of the run
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        # A request waits for the one before it on the same connection, and a group's requests may wait for a process
        # that is dead. So they have a connection of their own. It is opened here, because the store looks up the name
        # of a process that connects, which may take seconds (torch 2.13).
        self.connection = store.clone()  # None while a thread forms a group with it
        self.group: Any = None  # a ProcessGroupGloo
        self.works: list[dist.Work] = []  # its collectives
        self.abandoned: list[tuple[Any, list[dist.Work]]] = []  # earlier groups, with theirs

    def form(self, number: int, rank: int, size: int, should_abort: Callable[[], bool], poll_seconds: float) -> bool:
        """Forms the group of view `number`, unless a process does not connect or `should_abort` becomes true."""
        store = self.connection or self.store.clone()
        self.connection = None
        result = []

        def connect() -> None:
            with suppress(RuntimeError):
                store.set_timeout(GROUP_TIMEOUT)
                group_store = dist.PrefixStore(f"group/{number}", store)
                group: Any = dist.ProcessGroupGloo(group_store, rank, size, COLLECTIVE_TIMEOUT)
                group.allreduce([torch.zeros(1)]).wait(GROUP_TIMEOUT)
                self.connection = store
                result.append(group)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        deadline = time.monotonic() + CONNECT_SECONDS
        while thread.is_alive() and time.monotonic() < deadline and not should_abort():
            thread.join(poll_seconds)
        self.group = result[0] if result else None  # otherwise the thread ends by itself, and its group is not used
        return self.group is not None

    def start(self, collective: Callable[[Any], dist.Work]) -> dist.Work:
        """Starts a collective. Its tensors must be used nowhere else: if it is abandoned, it may complete later."""
        work = collective(self.group)
        self.works = [*unfinished(self.works), work]
        return work

    def abandon(self) -> None:
        """Uses this group no longer."""
        self.abandoned.append((self.group, self.works))
        self.abandoned = [(group, works) for group, works in self.abandoned if unfinished(works)]
        self.group = None
        self.works = []


def unfinished(works: list[dist.Work]) -> list[dist.Work]:
    return [work for work in works if not work.is_completed()]
