"""The rendezvous of ranks at a key-value store, and their heartbeats in it."""

import os
import platform
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mingpt.distributed.launch_environment import LOOPBACK, host_and_port, listening_address, restart_hint
from mingpt.distributed.position import (
    Heartbeat,
    Position,
    PositionReader,
    SlowRanks,
    count_collectives,
    decode_heartbeat,
    explain_wait,
)
from mingpt.utils.errors import PeerError, StoreUnreachableError, is_oom_error
from mingpt.utils.logging import logger

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 2.0  # seconds without one, after which a rank counts as gone
ALL_ALIVE_SECONDS = 0.7  # in which all ranks send a heartbeat if none is gone
GRACE_SECONDS = 5.0  # for the main thread to report an error, in which it waits for a snapshot that is being written
FILE_SYSTEM = "the file system"  # the host of a store at file://
NCCL_DUMP_KEY = "exception_dump"  # set by NCCL's watchdog, below all prefixes (kStoreDumpKey in ProcessGroupNCCL.hpp)


def uses_agent_store(init_method: str) -> bool:
    """Returns whether ranks rendezvous at the store of torchrun's agent."""
    return init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns a store that the ranks of this start share with each other, and with no earlier start.

    Raises:
        ValueError, RuntimeError, OSError: the address is invalid, or the other ranks did not connect.
    """
    if uses_agent_store(init_method):
        address, port = host_and_port(init_method)
        agent_store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        return generation_store(agent_store, rank, world_size, timeout)
    if init_method.startswith("file://"):  # PyTorch's rendezvous would take # and ? for the end of the path
        file_store = dist.FileStore(init_method.removeprefix("file://"), world_size)
        file_store.set_timeout(timeout)
        return generation_store(file_store, rank, world_size, timeout)
    host, port = host_and_port(init_method)
    if rank == 0 and listening_address(host) == LOOPBACK:
        return _host_store_on_loopback(port, world_size, timeout)
    store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store


def _host_store_on_loopback(port: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns the store of ranks on one machine; by itself it would listen at all addresses (torch 2.13)."""
    listener = socket.create_server((LOOPBACK, port), backlog=1024)
    descriptor = listener.detach()
    return dist.TCPStore(LOOPBACK, port, world_size, is_master=True, timeout=timeout, master_listen_fd=descriptor)


def generation_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns a view of a store that outlives its ranks, with a prefix that only the ranks of this start use.

    torchrun gives the same store to every generation of workers, and a file remains when ranks exit. gloo would read
    the addresses of dead processes there (torch 2.13: workers then hang or are refused at about every second restart).
    The restart count does not identify a generation, because a change of membership does not increase it. So each
    rank writes a new token. Rank 0 offers a new prefix to the tokens that it sees, and again whenever one changes. A
    rank that finds its own token in the offer accepts. When all have accepted, which dead ranks can't, rank 0 confirms.

    Raises:
        TimeoutError: the other ranks did not connect.
    """
    token, token_keys = uuid.uuid4().hex, [f"token/{other}" for other in range(world_size)]
    store.set(token_keys[rank], token)
    offered, deadline = None, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0 and offered != (tokens := store.multi_get(token_keys)):
            offered = tokens
            store.set("offer", " ".join([uuid.uuid4().hex, *(other.decode() for other in tokens)]))
        prefix, *offered_to = store.get("offer").decode().split()
        if offered_to[rank : rank + 1] == [token]:
            store.set(f"{prefix}/accepted/{rank}", "")
            if rank == 0 and store.check([f"{prefix}/accepted/{other}" for other in range(world_size)]):
                # If this key were still there when ranks proceed, NCCL would end them too, after some minutes
                # (HeartbeatMonitor::runLoop in ProcessGroupNCCL.cpp). The ranks that could set it again are dead.
                store.delete_key(NCCL_DUMP_KEY)
                store.set(f"{prefix}/confirmed", "")
            if store.check([f"{prefix}/confirmed"]):
                return dist.PrefixStore(prefix, store)
        time.sleep(0.02)
    raise TimeoutError(f"not all {world_size} ranks came to the store")


class HealthMonitor:
    """Heartbeats in the store, from which ranks find out which of them is gone.

    A backend's error says that some rank is gone or late, but not which one. So a thread of each rank sets a heartbeat
    with its position in the store, and after an error the main thread reads those of all ranks. The first rank that
    finds the cause writes it to the store for the others, since they see that rank exit in turn. The thread of rank 0
    also warns of ranks for which the others wait.

    A main thread that waits for a GPU gets no error: NCCL's kernel waits there for the rank that is gone. So each rank
    also watches the cause and the heartbeat of its successor, rank + 1. That makes four small requests per interval
    with any number of ranks; rank 0 makes one more, for all heartbeats. When there is a cause, after `timeout_seconds`
    without that heartbeat, or when a watchdog of NCCL has seen a failure, after which it ends its process within a
    minute, the main thread has GRACE_SECONDS to fail by itself. Then a thread reports the cause and ends the process.

    Args:
        store_host: the process that hosts the store, as messages name it
        timeout_seconds: how long a rank may be stopped
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, store_host: str, timeout_seconds: float) -> None:
        # Connections of their own: a request waits for the one before it on the same connection.
        self.heartbeat_store, self.store = (dist.PrefixStore("health", store.clone()) for _ in range(2))  # type: ignore[attr-defined]
        self.rank, self.world_size, self.store_host = rank, world_size, store_host
        self.timeout_seconds = timeout_seconds
        self.name = f"rank {rank} ({platform.node()}, process {os.getpid()})"
        self.heartbeat_keys = [f"heartbeat/{other}" for other in range(world_size)]
        self.store.set(f"name/{rank}", self.name)
        self.store.set(f"heartbeat/{rank}", Heartbeat(0).encode())
        self.stopped = threading.Event()
        self.is_watching = True
        self.report_lock = threading.RLock()  # held by the thread that reports an error and ends the process
        self.successor_heartbeat, self.has_failure = b"", False  # as last read
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
        successor = (self.rank + 1) % self.world_size
        root_store = self.heartbeat_store._underlying_non_prefix_store  # type: ignore[attr-defined]
        reader, slow_ranks = PositionReader(count_collectives), SlowRanks()
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            try:
                heartbeat = Heartbeat(time.monotonic(), reader.read())
                self.heartbeat_store.set(f"heartbeat/{self.rank}", heartbeat.encode())
                if self.rank == 0 and self.is_watching:
                    heartbeats = self.heartbeat_store.multi_get(self.heartbeat_keys)
                    slow_ranks.look(_positions(heartbeats), HEARTBEAT_INTERVAL)
                self.successor_heartbeat = self.heartbeat_store.get(f"heartbeat/{successor}")
                self.has_failure = self.heartbeat_store.check(["cause"]) or root_store.check([NCCL_DUMP_KEY])
            except (RuntimeError, OSError):  # training may continue without a store
                if self.store_host != FILE_SYSTEM:  # TCPStore does not connect again, and logs each trial
                    return

    def _watch(self) -> None:
        """Ends the process when another rank is gone and the main thread does not notice.

        It counts intervals instead of reading the clock, since this process may have been stopped too. If the store
        does not answer for so long and rank 0 hosts it, rank 0 is gone. The loss of a torchrun agent is no reason to
        end: torchrun notices it, and workers save a snapshot when theirs is gone.
        """
        last, silent = b"", 0
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            silent = silent + 1 if self.successor_heartbeat == last else 0
            last = self.successor_heartbeat
            is_silent = silent * HEARTBEAT_INTERVAL >= self.timeout_seconds
            if not self.is_watching or not (is_silent or self.has_failure):
                continue
            silent = 0
            try:
                cause = self._query(self._find_cause, None)
            except StoreUnreachableError as error:
                cause = str(error) if self.store_host == "rank 0" else ""
            is_blocked = cause and not self.stopped.wait(GRACE_SECONDS) and self.is_watching
            if is_blocked and self.report_lock.acquire(blocking=False):
                logger.error(f"{cause}{restart_hint(os.environ)}")
                os._exit(1)

    def exchange(self, message: str, ranks: Sequence[int]) -> dict[int, str]:
        """Sends a message to all ranks and returns those of `ranks`, for which it waits without a timeout.

        Raises:
            PeerError: one of `ranks` is gone, or the store (StoreUnreachableError).
        """
        self._query(self.store.set, f"message/{self.rank}", message)
        messages = {rank: self._wait_for("message", rank) for rank in ranks}
        self._query(self.store.set, f"received/{self.rank}", "")
        if self.rank == 0:  # it may host the store, which the others still read
            for rank in range(self.world_size):
                with suppress(PeerError):
                    self._wait_for("received", rank)
        return messages

    def _wait_for(self, topic: str, rank: int) -> str:
        last, changed = "", time.monotonic()
        while not self._query(self.store.check, [f"{topic}/{rank}"]):
            time.sleep(0.05)
            heartbeat = self._query(self.store.get, f"heartbeat/{rank}")
            if heartbeat != last:
                last, changed = heartbeat, time.monotonic()
            if time.monotonic() > changed + HEARTBEAT_TIMEOUT:
                raise PeerError(self._query(self._find_cause, None))
        return self._query(self.store.get, f"{topic}/{rank}").decode()

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise in place of `error`: a PeerError if the cause is another rank."""
        self.report_lock.acquire()
        if isinstance(error, RuntimeError) and not is_oom_error(error):  # as all backends raise, and others too
            try:
                cause = self._query(self._find_cause, error)
            except PeerError as unreachable:
                return unreachable
            if cause:
                # Rank 0 may host the store, which other ranks read a moment later.
                return PeerError(cause, 2 * HEARTBEAT_INTERVAL if self.rank == 0 else 0.0)
        summary = (str(error).strip().splitlines() or [""])[0]
        with suppress(PeerError):
            self._query(self.store.compare_set, "cause", "", f"{self.name} failed: {type(error).__name__}: {summary}")
        return error

    def _query(self, request: Callable[..., Any], *args: Any) -> Any:
        """Returns the store's answer. A thread waits for it, because a request to a stopped process blocks for ever."""
        answer: futures.Future[Any] = futures.Future()

        def send() -> None:
            try:
                answer.set_result(request(*args))
            except (RuntimeError, OSError) as error:
                answer.set_exception(error)

        threading.Thread(target=send, daemon=True).start()
        try:
            return answer.result(timeout=HEARTBEAT_TIMEOUT + 1)
        except (RuntimeError, OSError, futures.TimeoutError) as error:
            raise StoreUnreachableError(
                f"{self.store_host}, which hosts the store, is gone, stopped or cut off from {self.name}: no answer"
            ) from error

    def _find_cause(self, error: Exception | None) -> str:
        """Returns the cause that another rank has found, else the rank that is gone or late, else an empty string."""
        started, before = time.monotonic(), self.store.multi_get(self.heartbeat_keys)
        for seconds in (ALL_ALIVE_SECONDS, HEARTBEAT_TIMEOUT):
            while time.monotonic() < started + seconds:
                if self.store.check(["cause"]):
                    return self.store.get("cause").decode()
                time.sleep(0.1)
            now = self.store.multi_get(self.heartbeat_keys)
            silent = [rank for rank in range(self.world_size) if now[rank] == before[rank]]
            if not silent:
                break
        if self.rank in silent:
            return ""  # the store no longer shows even this rank's heartbeats, so it says nothing of the others
        names = {rank: self.store.get(f"name/{rank}").decode() for rank in range(self.world_size)}
        if silent:
            gone, last = " and ".join(names[rank] for rank in silent), _positions(now)
            lines = " and ".join(last[rank].line if rank in last else "the start" for rank in silent)
            cause = (
                f"{gone} sent no heartbeat for {HEARTBEAT_TIMEOUT:g} seconds: dead, stopped or cut off, last seen at "
                f"{lines}"
            )
        elif re.search("timeout|timed out|gloo", str(error), re.IGNORECASE):
            late = explain_wait(_positions(now), names)
            if not late and not re.search("timeout|timed out", str(error), re.IGNORECASE):
                return ""
            cause = f"all {self.world_size} ranks are alive, but {late or f'one did not answer in time: {error}'}"
        else:
            return ""
        return self.store.compare_set("cause", "", cause).decode()


def _positions(heartbeats: Sequence[bytes]) -> dict[int, Position]:
    """The positions in heartbeats, by rank. A rank's first heartbeat has none."""
    positions = [decode_heartbeat(heartbeat).position for heartbeat in heartbeats]
    return {rank: position for rank, position in enumerate(positions) if position}
