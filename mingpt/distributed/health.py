"""Which ranks are there, and which one is gone? The key-value store that ranks meet at, and their heartbeats in it."""

from __future__ import annotations

import os
import platform
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from mingpt.utils.errors import PeerError, StoreUnreachableError

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 2.0  # seconds without one, after which a rank counts as gone


def uses_agent_store(init_method: str) -> bool:
    """Whether ranks meet at the store of torchrun's agent."""
    return init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous(init_method: str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store that ranks of this start share with each other, and with no earlier start.

    Raises:
        ValueError, RuntimeError, OSError: the address is none, or the others did not come.
    """
    if uses_agent_store(init_method):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return generation_store(dist.TCPStore(address, port, is_master=False, timeout=timeout), rank, size, timeout)
    store, _, _ = next(dist.rendezvous(init_method, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return generation_store(store, rank, size, timeout) if init_method.startswith("file://") else store


def generation_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A store that holds what earlier starts left, seen through a prefix of this start's ranks alone.

    torchrun hands one store to every generation of workers, a file stays when ranks go, and gloo would read addresses
    of the dead there (torch 2.13: workers then hang or are refused at about every second restart). The restart count
    does not tell generations apart, for a change of membership leaves it as it is. So each rank greets with a new
    token; rank 0 offers a new prefix to the tokens it sees, and again when one changes; who finds its own token in the
    offer accepts; and once all have accepted, which the dead can't, rank 0 says go.

    Raises:
        TimeoutError: the others did not come.
    """
    token, greetings = uuid.uuid4().hex, [f"greeting/{other}" for other in range(size)]
    store.set(greetings[rank], token)
    offered = None
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0 and offered != (tokens := store.multi_get(greetings)):
            offered = tokens
            store.set("offer", " ".join([uuid.uuid4().hex, *(other.decode() for other in tokens)]))
        prefix, *invited = store.get("offer").decode().split()
        if invited[rank : rank + 1] == [token]:
            store.set(f"{prefix}/accepted/{rank}", "")
            if rank == 0 and store.check([f"{prefix}/accepted/{other}" for other in range(size)]):
                store.set(f"{prefix}/go", "")
            if store.check([f"{prefix}/go"]):
                return dist.PrefixStore(prefix, store)
        time.sleep(0.02)
    raise TimeoutError(f"not all {size} ranks came to the store")


class HealthMonitor:
    """The other ranks, as far as the store tells of them.

    A backend's error says that somebody is gone, not who. So each rank sets a heartbeat in the store, from a thread; it
    is read only when there is trouble. Whoever first finds out what happened leaves the verdict for the others, for
    they see it leave in turn.

    Args:
        store: of this start
        rank: this process's number
        size: how many there are
        host: who keeps the store, in words
    """

    def __init__(self, store: dist.Store, rank: int, size: int, host: str) -> None:
        # Connections of their own: another may be waiting for something in its own.
        self.pulse, self.line = (dist.PrefixStore("peers", store.clone()) for _ in range(2))  # type: ignore[attr-defined]
        self.rank, self.size, self.host = rank, size, host
        self.name = f"rank {rank} ({platform.node()}, process {os.getpid()})"
        self.line.set(f"name/{rank}", self.name)
        self.line.set(f"beat/{rank}", "")
        self.leaving = threading.Event()
        self.heart = threading.Thread(target=self._beat, daemon=True)
        self.heart.start()

    def _beat(self) -> None:
        with suppress(RuntimeError, OSError):  # without a store there is nobody to tell, and training may go on
            for number in count():
                self.pulse.set(f"beat/{self.rank}", str(number))
                if self.leaving.wait(HEARTBEAT_INTERVAL):
                    return

    def leave(self) -> None:
        """Ends the heartbeat and its thread."""
        self.leaving.set()
        self.heart.join(HEARTBEAT_TIMEOUT)

    def exchange(self, word: str, ranks: Sequence[int]) -> dict[int, str]:
        """Says a word, and waits, however long it takes, for those of these ranks; a collective would time out.

        Raises:
            PeerError: one of them is gone.
            NoAnswerError: the store is.
        """
        self._ask(self.line.set, f"word/{self.rank}", word)
        words = {rank: self._hear("word", rank) for rank in ranks}
        self._ask(self.line.set, f"heard/{self.rank}", "")
        if self.rank == 0:  # who may keep the store, for those who listen yet
            for rank in range(self.size):
                with suppress(PeerError):
                    self._hear("heard", rank)
        return words

    def _hear(self, topic: str, rank: int) -> str:
        last, changed = "", time.monotonic()
        while not self._ask(self.line.check, [f"{topic}/{rank}"]):
            time.sleep(0.05)
            now = self._ask(self.line.get, f"beat/{rank}")
            if now != last:
                last, changed = now, time.monotonic()
            if time.monotonic() > changed + HEARTBEAT_TIMEOUT:
                raise PeerError(self._ask(self._find, None))
        return self._ask(self.line.get, f"{topic}/{rank}").decode()

    def explain(self, error: Exception) -> Exception:
        """What to raise in place of `error`: it may be only what another rank's end looks like from here."""
        if isinstance(error, PeerError):
            return error
        if isinstance(error, RuntimeError):  # as all backends raise, and others too
            try:
                verdict = self._ask(self._find, error)
            except PeerError as lost:
                return lost
            if verdict:
                if self.rank == 0:  # who may keep the store, for those who notice a moment later
                    time.sleep(2 * HEARTBEAT_INTERVAL)
                return PeerError(verdict)
        words = (str(error).strip().splitlines() or [""])[0]
        with suppress(PeerError):
            self._ask(self.line.compare_set, "verdict", "", f"{self.name} failed: {type(error).__name__}: {words}")
        return error

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """The store's answer, or NoAnswerError where none comes in time: one whose host is stopped blocks for ever."""
        answers: queue.Queue = queue.Queue()

        def ask() -> None:
            try:
                answers.put(question(*args))
            except (RuntimeError, OSError) as error:
                answers.put(error)

        threading.Thread(target=ask, daemon=True).start()
        try:
            answer = answers.get(timeout=HEARTBEAT_TIMEOUT + 1)
        except queue.Empty:
            answer = TimeoutError("no answer")
        if isinstance(answer, Exception):
            raise StoreUnreachableError(
                f"{self.host}, where ranks meet, is gone, stopped or cut off from {self.name}: no answer"
            ) from answer
        return answer

    def _find(self, error: Exception | None) -> str:
        """Who is gone, in words: what another rank has found out, else whose heart does not beat; or nothing."""
        store = self.line
        beats = [f"beat/{rank}" for rank in range(self.size)]
        began, before = time.monotonic(), store.multi_get(beats)
        while time.monotonic() < began + HEARTBEAT_TIMEOUT:
            if store.check(["verdict"]):
                return store.get("verdict").decode()
            time.sleep(0.1)
        now = store.multi_get(beats)
        gone = [store.get(f"name/{rank}").decode() for rank in range(self.size) if now[rank] == before[rank]]
        if not gone and "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
            return ""
        words = (
            f"{' and '.join(gone)} sent no heartbeat for {HEARTBEAT_TIMEOUT:g} seconds: dead, stopped or cut off"
            if gone
            else f"all {self.size} ranks are alive, but one of them did not answer in time: {error}"
        )
        return store.compare_set("verdict", "", words).decode()
