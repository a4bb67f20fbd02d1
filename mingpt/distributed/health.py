"""The health of the ranks: detects dead, late and stopped ranks, and the line of the program where they are."""

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from mingpt.distributed.launcher import RankInfo, restart_hint
from mingpt.distributed.network import machine_id
from mingpt.distributed.position import Position, PositionReader, SlowRanks, explain_wait, format_list
from mingpt.distributed.rendezvous import NCCL_DUMP_KEY
from mingpt.errors import PeerError, StoreUnreachableError, UserError, is_oom_error
from mingpt.monitoring.logging import logger

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 2.0  # a rank without a heartbeat for this time counts as dead
ALL_ALIVE_SECONDS = 0.7  # all ranks send a heartbeat within this time, if none is dead
POLL_SECONDS = 0.1  # seconds between checks for a key in the store
ANSWER_SECONDS = 3.0  # timeout of a request to the store
USER_ERROR_SECONDS = 2.0  # how long a rank with a UserError waits for rank 0 to raise one, too
GRACE_SECONDS = 5.0  # time for the main thread to report an error and to finish writing a snapshot
FILE_SYSTEM = "the file system"  # the host of a store at file://


class HealthMonitor:
    """Heartbeats in the store, which tell ranks after an error which rank is dead.

    A backend's error says that some rank is dead or late, but not which one. gloo's error comes at once if a process
    has exited, otherwise after `timeout_seconds`. NCCL's error comes a minute later than that. So a thread of each rank
    sets a heartbeat with the rank's position in the store, and after an error the main threads read all heartbeats. The
    first rank that finds the cause writes it to the store for the others. The thread of rank 0 also warns of ranks that
    the others wait for.

    A main thread that waits for a GPU does not get an error, because NCCL's kernel waits there for the dead rank. So
    each rank also watches the store for a cause, and the heartbeat of its successor, rank + 1. If there is a cause, if
    that heartbeat is missing for `timeout_seconds`, or if NCCL's watchdog has seen a failure and will end its process
    within a minute, the main thread has GRACE_SECONDS to fail by itself. Then a thread reports the cause and ends the
    process.

    Args:
        store_host: the process that hosts the store, for messages
        timeout_seconds: how long a rank may be stopped
    """

    def __init__(self, store: dist.Store, info: RankInfo, store_host: str, timeout_seconds: float) -> None:
        # Separate connections, since a request waits for the previous one on the same connection.
        self.store: dist.Store = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.heartbeat_store: Any = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.info = info
        self.store_host = store_host
        self.timeout_seconds = timeout_seconds
        self.name = f"rank {info.rank} ({platform.node()}, process {os.getpid()})"
        self.heartbeat_keys = [f"heartbeat/{rank}" for rank in range(info.world_size)]
        self.heartbeat_of_successor = b""  # the newest
        self.reader = PositionReader()
        self._send_heartbeat(self.store, 0)  # other ranks wait for the key
        self.has_failure = False  # whether the store has a cause, or NCCL's watchdog has seen a failure
        self.cause = ""  # empty until it is known
        self.stopped = threading.Event()
        self.is_watching = True
        self.report_lock = threading.RLock()  # held by the thread that reports an error and ends the process
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._send_heartbeats, self._watch)]

    def start(self) -> None:
        """Starts the heartbeats. All ranks must have constructed their HealthMonitor before."""
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Ends the heartbeats. The caller reports the error, if there is one."""
        self.report_lock.acquire()
        self.stopped.set()

    def _send_heartbeat(self, store: dist.Store, number: int) -> None:
        """Sets this rank's heartbeat, which differs each time by its number."""
        store.set(self.heartbeat_keys[self.info.rank], json.dumps([number, self.name, self.reader.read()]))

    def _send_heartbeats(self) -> None:
        store = self.heartbeat_store
        root_store = store._underlying_non_prefix_store
        slow_ranks = SlowRanks()
        number = 0
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            number += 1
            try:
                self._send_heartbeat(store, number)
                heartbeats = store.multi_get(self.heartbeat_keys)
                self.heartbeat_of_successor = heartbeats[(self.info.rank + 1) % self.info.world_size]
                self.has_failure = store.check(["cause"]) or root_store.check([NCCL_DUMP_KEY])
            except (RuntimeError, OSError):  # training may continue without a store
                if self.store_host != FILE_SYSTEM:  # TCPStore does not reconnect, and logs each attempt
                    return
                continue
            if self.info.rank == 0 and self.is_watching:
                slow_ranks.look(read_positions(heartbeats), HEARTBEAT_INTERVAL)

    def _watch(self) -> None:
        """Ends the process if another rank is dead and the main thread does not notice.

        It counts intervals instead of reading the clock, since this process may have been stopped, too. If the store
        does not answer for that long and rank 0 hosts it, rank 0 is dead. The loss of a torchrun agent is not a reason
        to end: torchrun notices it, and workers save a snapshot when their agent is dead.
        """
        last = b""
        silent = 0
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            heartbeat = self.heartbeat_of_successor
            silent = silent + 1 if heartbeat == last else 0
            last = heartbeat
            is_silent = silent * HEARTBEAT_INTERVAL >= self.timeout_seconds
            if not self.is_watching or not (is_silent or self.has_failure):
                continue
            silent = 0
            try:
                cause = self._find_cause(None)
            except StoreUnreachableError as error:
                cause = str(error) if self.store_host == "rank 0" else ""
            is_blocked = cause and not self.stopped.wait(GRACE_SECONDS) and self.is_watching
            if is_blocked and self.report_lock.acquire(blocking=False):
                if self._is_reporter():
                    logger.error(f"{cause}{restart_hint(os.environ)}")
                os._exit(1)

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise in place of `error`: a PeerError if the cause is another rank.

        One rank of each machine reports a PeerError. Rank 0 reports a UserError that all ranks raise.
        """
        self.report_lock.acquire()
        if isinstance(error, UserError):
            return self._assign_reporter(error)
        explained = error if isinstance(error, PeerError) else self._find_peer_error(error)
        if isinstance(explained, PeerError):
            explained.is_reported = not self._is_reporter()
        return explained

    def _find_peer_error(self, error: Exception) -> Exception:
        """Returns a PeerError if another rank is the cause of an error; otherwise shares the error with other ranks."""
        if isinstance(error, RuntimeError) and not is_oom_error(error):  # the class of all backends' errors
            try:
                cause = self._find_cause(error)
            except StoreUnreachableError as unreachable:
                return unreachable
            if cause:
                # Rank 0 may host the store. Other ranks read it a moment later, or some seconds later on shared cores.
                linger_seconds = min(GRACE_SECONDS, 1.0 + self.info.world_size / 16)
                return PeerError(cause, linger_seconds if self.info.rank == 0 else 0.0)
        summary = (str(error).strip().splitlines() or [""])[0]
        with suppress(StoreUnreachableError):
            self._share_cause(f"{self.name} failed: {type(error).__name__}: {summary}")
        return error

    def _assign_reporter(self, error: UserError) -> UserError:
        """Lets rank 0 report a UserError. If rank 0 does not raise one, too, this rank's message names this rank.

        If the store does not answer, rank 0 may have hosted it until it reported the error.
        """
        error.is_reported = self.info.rank > 0
        with suppress(StoreUnreachableError):
            if self.info.rank == 0:
                self._query(self.store.set, "user error", "")
            elif not self._await_key("user error", USER_ERROR_SECONDS):
                self._share_cause(f"{self.name} failed: {error}")
                return UserError(f"rank {self.info.rank}: {error}", is_reported=not self._is_reporter())
        return error

    def _is_reporter(self) -> bool:
        """Returns whether this rank reports an error of all ranks: the first rank on its machine that calls this.

        Without a store, each rank is a reporter. If rank 0 has reported the cause and then ended with the store, only
        local rank 0 is.
        """
        if self.info.local_rank is None:  # started by hand, maybe each rank in its own terminal
            return True
        try:
            reporter = self._query(self.store.compare_set, f"reporter/{machine_id()}", "", self.name)
        except StoreUnreachableError:
            return not self.cause or self.info.local_rank == 0
        return reporter.decode() == self.name

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

    def _find_cause(self, error: Exception | None) -> str:
        """Returns the cause that another rank has found, or the rank that is dead or late, or an empty string.

        All ranks call this at about the same time.
        """
        self.cause = self.cause or self._await_cause(0) or self._read_heartbeats(error)
        return self.cause

    def _await_cause(self, seconds: float) -> str:
        """Returns the cause that another rank finds within `seconds`, otherwise an empty string."""
        return self._query(self.store.get, "cause").decode() if self._await_key("cause", seconds) else ""

    def _await_key(self, key: str, seconds: float) -> bool:
        """Returns whether the store has a key within `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._query(self.store.check, [key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _share_cause(self, cause: str) -> str:
        """Writes the cause to the store, unless another rank already has. Returns the cause in the store."""
        return self._query(self.store.compare_set, "cause", "", cause).decode()

    def _read_heartbeats(self, error: Exception | None) -> str:
        """Reads the heartbeats of all ranks twice or three times. Returns the cause, as in `_find_cause`."""
        before = self._query(self.store.multi_get, self.heartbeat_keys)
        started = time.monotonic()
        for seconds in (ALL_ALIVE_SECONDS, HEARTBEAT_TIMEOUT):
            if cause := self._await_cause(started + seconds - time.monotonic()):
                return cause
            now = self._query(self.store.multi_get, self.heartbeat_keys)
            silent = [rank for rank in range(self.info.world_size) if now[rank] == before[rank]]
            if not silent:
                break
        if self.info.rank in silent:
            return ""  # this rank's own heartbeats do not reach the store, so the others' may not, either
        names = [json.loads(heartbeat)[1] for heartbeat in now]
        positions = read_positions(now)
        if silent:
            dead = format_list([names[rank] for rank in silent])
            lines = format_list([positions[rank].line for rank in silent])
            return self._share_cause(
                f"{dead} sent no heartbeat for {HEARTBEAT_TIMEOUT:g} seconds: dead, stopped or cut off, last seen at "
                f"{lines}"
            )
        # Only its text tells a gloo error from other RuntimeErrors.
        is_timeout = re.search("timeout|timed out", str(error), re.IGNORECASE) is not None
        if not is_timeout and "gloo" not in str(error).lower():
            return ""
        late = explain_wait(positions, names)
        if not late and not is_timeout:
            return ""
        return self._share_cause(
            f"all {self.info.world_size} ranks are alive, but {late or f'one did not answer in time: {error}'}"
        )


def read_positions(heartbeats: Sequence[bytes]) -> list[Position]:
    """Returns the positions in the heartbeats of all ranks."""
    return [Position(*json.loads(heartbeat)[2]) for heartbeat in heartbeats]
