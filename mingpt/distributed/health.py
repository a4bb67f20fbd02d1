"""The health of the ranks: which of them is dead, late or stopped, and since which line of the program."""

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mingpt.distributed.launcher import detect_launch_environment, machine_id, restart_hint
from mingpt.distributed.position import Position, PositionReader, SlowRanks, explain_wait, format_list
from mingpt.distributed.rendezvous import NCCL_DUMP_KEY
from mingpt.errors import PeerError, StoreUnreachableError, is_oom_error
from mingpt.monitoring.logging import logger

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats, and between looks at those of others
HEARTBEAT_TIMEOUT = 2.0  # seconds without one, after which a rank counts as dead
ALL_ALIVE_SECONDS = 0.7  # in which all ranks send a heartbeat if none is dead
ANSWER_SECONDS = 3.0  # in which the store answers a request, and a rank reads all heartbeats
SCANNERS = 16  # ranks that read all heartbeats at the same time
GRACE_SECONDS = 5.0  # for the main thread to report an error, in which it waits for a snapshot that is being written
TRACE_SECONDS = 3.0  # for NCCL's trace to be written
FILE_SYSTEM = "the file system"  # the host of a store at file://


class HealthMonitor:
    """Heartbeats in the store, from which ranks find out which of them is dead.

    A backend's error says that some rank is dead or late, but not which one; gloo's comes at once where a process has
    exited, else after `timeout_seconds`, and NCCL's a minute after that. So a thread of each rank sets a heartbeat
    with its position in the store, and after an error the main threads of a few ranks read those of all ranks. The
    first rank that finds the cause writes it to the store for the others, which wait for it there, and which see that
    rank exit in turn. The thread of rank 0 also warns of ranks for which the others wait.

    A main thread that waits for a GPU gets no error: NCCL's kernel waits there for the rank that is dead. So each rank
    also watches the cause and the heartbeat of its successor, rank + 1. That makes four small requests per interval
    with any number of ranks; rank 0 makes one more, for all heartbeats. When there is a cause, after `timeout_seconds`
    without that heartbeat, or when a watchdog of NCCL has seen a failure, after which it ends its process within a
    minute, the main thread has GRACE_SECONDS to fail by itself. Then a thread reports the cause and ends the process.

    Args:
        store_host: the process that hosts the store, as messages name it
        timeout_seconds: how long a rank may be stopped
        traces: path of the dumps of NCCL's flight recorder, without the rank at their end; empty without NCCL
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, store_host: str, timeout_seconds: float, traces: str = ""
    ) -> None:
        # Connections of their own: a request waits for the one before it on the same connection.
        self.store: dist.Store = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.heartbeat_store: Any = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.rank = rank
        self.world_size = world_size
        self.store_host = store_host
        self.timeout_seconds = timeout_seconds
        self.traces = traces
        self.name = f"rank {rank} ({platform.node()}, process {os.getpid()})"
        self.heartbeat_keys = [f"heartbeat/{other}" for other in range(world_size)]
        self.successor = (rank + 1) % world_size
        self.heartbeat_of_successor = b""  # as last read
        self.store.set(f"name/{rank}", self.name)
        self.store.set(self.heartbeat_keys[rank], encode_heartbeat(0, None))  # others wait for the key
        self.has_failure = False  # as last read
        self.cause = ""  # as far as it is known
        self.poll_seconds = max(0.1, world_size / 2000)  # between looks for a cause
        self.stopped = threading.Event()
        self.is_watching = True
        self.report_lock = threading.RLock()  # held by the thread that reports an error and ends the process
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._send_heartbeats, self._watch)]

    def start(self) -> None:
        """Starts the heartbeats, after all ranks have constructed theirs."""
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Ends the heartbeats. The caller reports the error, if there is one."""
        self.report_lock.acquire()
        self.stopped.set()

    def _send_heartbeats(self) -> None:
        store = self.heartbeat_store
        root_store = store._underlying_non_prefix_store
        reader = PositionReader()
        slow_ranks = SlowRanks()
        number = 0
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            number += 1
            try:
                store.set(self.heartbeat_keys[self.rank], encode_heartbeat(number, reader.read()))
                if self.rank == 0 and self.is_watching:
                    heartbeats = store.multi_get(self.heartbeat_keys)
                    slow_ranks.look(read_positions(heartbeats), HEARTBEAT_INTERVAL)
                    self.heartbeat_of_successor = heartbeats[self.successor]
                else:
                    [self.heartbeat_of_successor] = store.multi_get([self.heartbeat_keys[self.successor]])
                self.has_failure = store.check(["cause"]) or root_store.check([NCCL_DUMP_KEY])
            except (RuntimeError, OSError):  # training may continue without a store
                if self.store_host != FILE_SYSTEM:  # TCPStore does not connect again, and logs each trial
                    return

    def _watch(self) -> None:
        """Ends the process when another rank is dead and the main thread does not notice.

        It counts intervals instead of reading the clock, since this process may have been stopped too. If the store
        does not answer for so long and rank 0 hosts it, rank 0 is dead. The loss of a torchrun agent is no reason to
        end: torchrun notices it, and workers save a snapshot when theirs is dead.
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
            self._dump_trace(cause)
            is_blocked = cause and not self.stopped.wait(GRACE_SECONDS) and self.is_watching
            if is_blocked and self.report_lock.acquire(blocking=False):
                if self.is_reporter():
                    logger.error(f"{cause}{restart_hint(os.environ)}")
                os._exit(1)

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise in place of `error`: a PeerError if the cause is another rank."""
        self.report_lock.acquire()
        if isinstance(error, RuntimeError) and not is_oom_error(error):  # as all backends raise, and others too
            try:
                cause = self._find_cause(error)
            except PeerError as unreachable:
                return unreachable
            if cause:
                self._dump_trace(cause)
                # Rank 0 may host the store, which other ranks read a moment later; if many share a core, some seconds.
                linger_seconds = min(GRACE_SECONDS, 2 * HEARTBEAT_INTERVAL + self.world_size / 16)
                return PeerError(cause, linger_seconds if self.rank == 0 else 0.0)
        summary = (str(error).strip().splitlines() or [""])[0]
        with suppress(PeerError):
            self._query(self.store.compare_set, "cause", "", f"{self.name} failed: {type(error).__name__}: {summary}")
        return error

    def is_reporter(self) -> bool:
        """Whether this rank reports an error of all: the first on its machine that asks.

        Without a store it is each rank, or, if rank 0 has reported the cause before it ended with the store, local
        rank 0.
        """
        local_rank = detect_launch_environment(os.environ).local_rank
        if local_rank is None:  # started by hand, maybe each in a terminal
            return True
        try:
            reporter = self._query(self.store.compare_set, f"reporter/{machine_id()}", "", self.name)
        except StoreUnreachableError:
            return not self.cause or local_rank == 0
        return reporter.decode() == self.name

    def _dump_trace(self, cause: str) -> None:
        """Writes what NCCL has recorded on this rank, if the cause says so; in a thread, since a driver may hang."""

        def write() -> None:
            with suppress(OSError):
                trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
                Path(f"{self.traces}{self.rank}").write_bytes(trace)

        if self.traces and self.traces in cause:
            thread = threading.Thread(target=write, daemon=True)
            thread.start()
            thread.join(TRACE_SECONDS)

    def _query(self, request: Callable[..., Any], *args: Any) -> Any:
        """Returns the store's answer. A thread waits for it, because a request to a stopped process blocks for ever."""
        answer: futures.Future[Any] = futures.Future()

        def send() -> None:
            try:
                answer.set_result(request(*args))
            except (RuntimeError, OSError) as error:
                answer.set_exception(error)

        try:
            threading.Thread(target=send, daemon=True).start()  # raises without memory for it
            return answer.result(timeout=ANSWER_SECONDS)
        except (RuntimeError, OSError, futures.TimeoutError) as error:
            raise StoreUnreachableError(
                f"{self.store_host}, which hosts the store, is dead, stopped or cut off from {self.name}: no answer"
            ) from error

    def _find_cause(self, error: Exception | None) -> str:
        """Returns the cause that another rank has found, else the rank that is dead or late, else an empty string.

        All ranks call this at about the same time. SCANNERS of them look for the cause themselves. The others wait for
        what those find, and if nothing comes, SCANNERS of them look next.
        """
        self.cause = self.cause or self._await_cause(0)
        if not self.cause:
            scans = self._query(self.store.add, "scans", 1)
            self.cause = self._await_cause((scans - 1) // SCANNERS * ANSWER_SECONDS) or self._scan(error)
        if not self.cause:
            self._query(self.store.add, "scans", -1)
        return self.cause

    def _await_cause(self, seconds: float) -> str:
        """Returns the cause that another rank finds within so many seconds, else an empty string."""
        deadline = time.monotonic() + seconds
        while not self._query(self.store.check, ["cause"]):
            if time.monotonic() >= deadline:
                return ""
            time.sleep(self.poll_seconds)
        return self._query(self.store.get, "cause").decode()

    def _scan(self, error: Exception | None) -> str:
        """Reads the heartbeats of all ranks twice or three times, and returns what `_find_cause` does."""
        before = self._query(self.store.multi_get, self.heartbeat_keys)
        started = time.monotonic()
        for seconds in (ALL_ALIVE_SECONDS, HEARTBEAT_TIMEOUT):
            if cause := self._await_cause(started + seconds - time.monotonic()):
                return cause
            now = self._query(self.store.multi_get, self.heartbeat_keys)
            silent = [rank for rank in range(self.world_size) if now[rank] == before[rank]]
            if not silent:
                break
        if self.rank in silent:
            return ""  # the store no longer shows even this rank's heartbeats, so it says nothing of the others
        found = self._query(self.store.multi_get, [f"name/{rank}" for rank in range(self.world_size)])
        names = {rank: name.decode() for rank, name in enumerate(found)}
        if silent:
            dead = format_list([names[rank] for rank in silent])
            last = read_positions(now)
            lines = format_list([last[rank].line if rank in last else "the start" for rank in silent])
            cause = (
                f"{dead} sent no heartbeat for {HEARTBEAT_TIMEOUT:g} seconds: dead, stopped or cut off, last seen at "
                f"{lines}"
            )
        elif re.search("timeout|timed out|gloo", str(error), re.IGNORECASE):
            late = explain_wait(read_positions(now), names)
            if not late and not re.search("timeout|timed out", str(error), re.IGNORECASE):
                return ""
            cause = f"all {self.world_size} ranks are alive, but {late or f'one did not answer in time: {error}'}"
            if self.traces:
                cause += f"; each rank writes the trace of NCCL's flight recorder to {self.traces}RANK"
        else:
            return ""
        return self._query(self.store.compare_set, "cause", "", cause).decode()


def encode_heartbeat(number: int, position: Position | None) -> str:
    """What a rank sets in the store: another number each time, and where it is; None: it has just started."""
    return json.dumps([number, position])


def read_positions(heartbeats: Sequence[bytes]) -> dict[int, Position]:
    """The positions in the heartbeats of all ranks, by rank. The first heartbeat of a rank has none."""
    positions = {}
    for rank, heartbeat in enumerate(heartbeats):
        _, position = json.loads(heartbeat)
        if position is not None:
            positions[rank] = Position(*position)
    return positions
