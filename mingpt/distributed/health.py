"""Sends heartbeats, and finds the cause of an error, such as a rank that is dead or hangs."""

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from mingpt.distributed.launcher import RankInfo, restart_hint
from mingpt.distributed.network import machine_id
from mingpt.distributed.position import Position, PositionReader, describe_positions, format_list
from mingpt.errors import PeerError, is_oom_error
from mingpt.monitoring.logging import set_reporter

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 2.0  # a rank without a heartbeat for this time counts as dead
ALL_ALIVE_SECONDS = 0.7  # all ranks send a heartbeat within this time, if none is dead
POLL_SECONDS = 0.1  # seconds between checks for the cause in the store
ANSWER_SECONDS = 3.0  # timeout of a request to the store
LINGER_SECONDS = 2.0  # rank 0 ends so much later than other ranks, if it hosts the store
ALL_ALIVE = "ranks are alive"
FILE_SYSTEM = "the file system"  # the host of a store at file://
RANK_0 = "rank 0"  # the host of a store that a launcher or a file does not provide


class StoreUnreachableError(Exception):
    """The rendezvous store does not answer."""


class HealthMonitor:
    """Exchanges heartbeats through the store, so that after an error the ranks can tell its cause.

    A backend's error says that some rank is dead or late, but not which one. gloo raises it at once if a process has
    exited, otherwise after `distributed.timeout_seconds`. Therefore, a thread of each rank writes heartbeats with its
    position to the store. After an error, the first rank that asks reads the heartbeats of all ranks, and writes the
    cause to the store for the others. The number of requests of a rank does not depend on the number of ranks.

    Args:
        store_host: the process that hosts the store, for messages

    Attributes:
        step: a number that the main thread increases in each step
    """

    def __init__(self, store: dist.Store, info: RankInfo, store_host: str) -> None:
        # Separate connections, since a request waits for the previous one on the same connection.
        self.store: dist.Store = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.heartbeat_store: dist.Store = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.info = info
        self.store_host = store_host
        self.is_host = info.rank == 0 and store_host == RANK_0
        self.name = f"rank {info.rank} ({platform.node()}, process {os.getpid()})"
        self.step = 0
        self.cause = ""  # empty until this rank has read it
        self.reader = PositionReader()
        self._send_heartbeat(0)  # other ranks wait for the key
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._send_heartbeats, daemon=True)

    def start(self) -> None:
        """Starts the heartbeats. All ranks must have constructed their HealthMonitor before."""
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()

    def _send_heartbeat(self, number: int) -> None:
        """Writes this rank's heartbeat to the store. The number makes each one different."""
        heartbeat = json.dumps([number, self.name, self.reader.read(self.step)])
        self.heartbeat_store.set(f"heartbeat/{self.info.rank}", heartbeat)

    def _send_heartbeats(self) -> None:
        number = 0
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            number += 1
            try:
                self._send_heartbeat(number)
                # Read now: when this rank gets an error, rank 0 may have ended, and the store with it.
                if not self.cause and self.heartbeat_store.check(["cause"]):
                    self.cause = self.heartbeat_store.get("cause").decode()
            except (RuntimeError, OSError):  # training may continue without a store
                if self.store_host != FILE_SYSTEM:  # TCPStore does not reconnect, and logs each attempt
                    return

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise in place of `error`: a PeerError if the cause is another rank.

        The first rank of each machine that has a PeerError reports it.
        """
        cause = ""
        if isinstance(error, RuntimeError) and not is_oom_error(error):  # the class of all backends' errors
            try:
                cause = self._find_cause(error)
            except StoreUnreachableError as unreachable:
                cause = str(unreachable)
        if not cause:
            summary = (str(error).strip().splitlines() or [""])[0]
            with suppress(StoreUnreachableError):
                self._share_cause(f"{self.name} failed: {type(error).__name__}: {summary}")
            return error
        if self.is_host:  # other ranks read the store when they get the error, a moment later
            time.sleep(LINGER_SECONDS)
        set_reporter(self._is_first_of_machine())
        hint = restart_hint(os.environ)
        if hint and ALL_ALIVE in cause:
            hint += ", unless changed code makes ranks wait for each other"
        return PeerError(cause + hint)

    def _is_first_of_machine(self) -> bool:
        """Returns whether this rank is the first one of its machine that calls this.

        If the store does not answer, and rank 0 has reported the cause before it ended the store, local rank 0 is the
        first one. If the cause is unknown, each rank is, like ranks that are started by hand, maybe in own terminals.
        """
        if self.info.local_rank is None:
            return True
        try:
            return self._is_first(f"reporter/{machine_id()}")
        except StoreUnreachableError:
            return not self.cause or self.info.local_rank == 0

    def _find_cause(self, error: RuntimeError) -> str:
        """Returns the cause that another rank has found, or the ranks that are dead or late, or an empty string.

        All ranks call this at about the same time.
        """
        cause = self.cause or self._await_cause(0)
        if not cause and not self._is_first("reader"):
            cause = self._await_cause(HEARTBEAT_TIMEOUT + ANSWER_SECONDS)
        return cause or self._read_heartbeats(error)

    def _read_heartbeats(self, error: RuntimeError) -> str:
        """Reads the heartbeats of all ranks twice or three times. Returns the cause, as in `_find_cause`."""
        keys = [f"heartbeat/{rank}" for rank in range(self.info.world_size)]
        before = self._query(self.store.multi_get, keys)
        started = time.monotonic()
        for seconds in (ALL_ALIVE_SECONDS, HEARTBEAT_TIMEOUT):
            if cause := self._await_cause(started + seconds - time.monotonic()):
                return cause
            now = self._query(self.store.multi_get, keys)
            silent = [rank for rank in range(self.info.world_size) if now[rank] == before[rank]]
            if not silent:
                break
        if self.info.rank in silent:
            return ""  # this rank's own heartbeats do not reach the store, so others may be missing for the same reason
        _, names, values = zip(*map(json.loads, now), strict=True)
        positions = [Position(*value) for value in values]
        if silent:
            dead = format_list([names[rank] for rank in silent], " and ")
            last_places = format_list([positions[rank].place for rank in silent], " and ")
            return self._share_cause(
                f"{dead} sent no heartbeat for {HEARTBEAT_TIMEOUT:g} seconds: dead, stopped or cut off, last seen in "
                f"{last_places}"
            )
        # Only its text tells a gloo error from other RuntimeErrors.
        text = str(error).lower()
        is_timeout = "timeout" in text or "timed out" in text
        places = describe_positions(positions)
        if not is_timeout and ("gloo" not in text or len(places) == 1):
            return ""
        return self._share_cause(f"all {self.info.world_size} {ALL_ALIVE}; {format_list(places, '; ')}")

    def _share_cause(self, cause: str) -> str:
        """Writes the cause to the store, unless another rank already has. Returns the cause in the store."""
        return self._query(self.store.compare_set, "cause", "", cause).decode()

    def _await_cause(self, seconds: float) -> str:
        """Returns the cause that another rank finds within `seconds`, otherwise an empty string."""
        deadline = time.monotonic() + seconds
        while not self._query(self.store.check, ["cause"]):
            if time.monotonic() >= deadline:
                return ""
            time.sleep(POLL_SECONDS)
        return self._query(self.store.get, "cause").decode()

    def _is_first(self, key: str) -> bool:
        """Returns whether this rank is the first one that calls this for a key."""
        return self._query(self.store.compare_set, key, "", self.name).decode() == self.name

    def _query(self, request: Callable[..., Any], *args: Any) -> Any:
        """Returns the store's answer. A thread waits for it, because a request to a stopped process blocks forever."""
        answer: futures.Future[Any] = futures.Future()

        def send() -> None:
            try:
                answer.set_result(request(*args))
            except (RuntimeError, OSError) as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=send, daemon=True).start()  # raises if there is not enough memory
            return answer.result(timeout=ANSWER_SECONDS)
        except (RuntimeError, OSError, futures.TimeoutError) as error:
            raise StoreUnreachableError(
                f"{self.store_host}, which hosts the store, is dead, stopped or cut off from {self.name}: no answer"
            ) from error
