"""Sends heartbeats, and finds the cause of an error, such as a rank that is dead or hangs."""

import json
import os
import platform
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from mingpt.distributed.launcher import RankInfo, restart_hint
from mingpt.distributed.rendezvous import machine_id
from mingpt.errors import PeerError, is_oom_error
from mingpt.monitoring.logging import set_reporter

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 2.0  # a rank without a heartbeat for this time counts as dead
ANSWER_SECONDS = 5.0  # how long the store's answers may take
LINGER_SECONDS = 2.0  # rank 0 ends so much later than other ranks, if it hosts the store
RANK_0 = "rank 0"  # the host of a store that a launcher or a file does not provide
ROOT = f"{Path(__file__).parents[2]}/"
COLLECTIVES = f"{Path(__file__).parent}/"  # code of collectives; messages name its callers


class HealthMonitor:
    """Exchanges heartbeats through the store, so that after an error the ranks can tell its cause.

    A backend's error says that some rank is dead or late, but not which one. gloo raises it at once if a process has
    exited, otherwise after `distributed.timeout_seconds`. Therefore, a thread of each rank writes heartbeats to the
    store, with the line that the main thread executes. After an error, a rank reads the heartbeats of all ranks, and
    writes the cause to the store for the ranks whose errors are its consequence.

    Args:
        store_host: the process that hosts the store, for messages
    """

    def __init__(self, store: dist.Store, info: RankInfo, store_host: str) -> None:
        # Separate connections, since a request waits for the previous one on the same connection.
        self.store: dist.Store = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.heartbeat_store: dist.Store = dist.PrefixStore("health", store.clone())  # type: ignore[attr-defined]
        self.info = info
        self.store_host = store_host
        self.name = f"rank {info.rank} ({platform.node()}, process {os.getpid()})"
        self.heartbeats = 0
        self.place = ""
        self._send_heartbeat()  # other ranks wait for the key
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._send_heartbeats, daemon=True)

    def start(self) -> None:
        """Starts the heartbeats. All ranks must have constructed their HealthMonitor before."""
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()

    def _send_heartbeat(self) -> None:
        """Writes a heartbeat. After an error in a collective, the place stays at that collective."""
        main_thread = threading.main_thread().ident
        handled = sys._current_exceptions().get(main_thread)  # type: ignore[arg-type]
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
        if not isinstance(error, RuntimeError):  # the class of all backends' errors
            self.place = find_place(sys._current_frames().get(main_thread))  # type: ignore[arg-type]
        self.heartbeats += 1  # so that each one differs
        heartbeat = json.dumps([self.heartbeats, self.name, self.place])
        self.heartbeat_store.set(f"heartbeat/{self.info.rank}", heartbeat)

    def _send_heartbeats(self) -> None:
        while not self.stopped.wait(HEARTBEAT_INTERVAL):
            try:
                self._send_heartbeat()
            except (RuntimeError, OSError):  # training may continue without a store; TCPStore does not reconnect
                return

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise in place of `error`: a PeerError if the cause is another rank.

        The first rank of each machine that has a PeerError reports it.
        """
        answer: futures.Future[str] = futures.Future()

        def find() -> None:
            try:
                answer.set_result(self._find_cause(error))
            except (RuntimeError, OSError) as unreachable:
                answer.set_exception(unreachable)

        try:
            threading.Thread(target=find, daemon=True).start()  # a request to a stopped process blocks forever
            cause = answer.result(timeout=HEARTBEAT_TIMEOUT + ANSWER_SECONDS)
        except (RuntimeError, OSError, futures.TimeoutError):
            if _is_own(error):
                return error
            set_reporter(True)
            cause = f"{self.store_host}, which hosts the store, is dead, stopped or cut off from {self.name}: no answer"
        if not cause:
            return error
        if self.info.rank == 0 and self.store_host == RANK_0:  # other ranks read the store a moment later
            time.sleep(LINGER_SECONDS)
        return PeerError(cause + restart_hint(os.environ))

    def _find_cause(self, error: Exception) -> str:
        """Returns what the first rank with an error has found out; empty: the error is this rank's own."""
        cause = "" if _is_own(error) else self._read_heartbeats(error)
        if not cause:
            summary = (str(error).strip().splitlines() or [""])[0]
            self._share("cause", f"{self.name} failed: {type(error).__name__}: {summary}")
            return ""
        cause = self._share("cause", cause)
        is_by_hand = self.info.local_rank is None  # maybe each in its own terminal
        set_reporter(is_by_hand or self._share(f"reporter/{machine_id()}", self.name) == self.name)
        return cause

    def _read_heartbeats(self, error: Exception) -> str:
        """Returns the cause, if another rank has found it, or some are dead, or a collective has timed out."""
        keys = [f"heartbeat/{rank}" for rank in range(self.info.world_size)]
        before = self.store.multi_get(keys)
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        while time.monotonic() < deadline:
            if self.store.check(["cause"]):
                return self.store.get("cause").decode()
            time.sleep(0.1)
        now = self.store.multi_get(keys)
        _, names, places = zip(*map(json.loads, now), strict=True)
        if silent := [rank for rank in range(self.info.world_size) if now[rank] == before[rank]]:
            dead = " and ".join(f"{names[rank]}" for rank in silent)
            last_places = " and ".join(places[rank] for rank in silent)
            return (
                f"{dead} sent no heartbeat for {HEARTBEAT_TIMEOUT:g} seconds: dead, stopped or cut off, last seen in "
                f"{last_places}"
            )
        text = str(error).lower()  # only it tells a collective that has timed out from other RuntimeErrors
        if "timeout" not in text and "timed out" not in text:
            return ""
        ranks: dict[str, list[str]] = {}
        for rank, place in enumerate(places):
            ranks.setdefault(place, []).append(str(rank))
        waiting = "; ".join(f"rank {', '.join(found)}: in {place}" for place, found in ranks.items())
        return f"all {self.info.world_size} ranks are alive; {waiting}"

    def _share(self, key: str, value: str) -> str:
        """Writes a value to the store, unless another rank already has. Returns the value in the store."""
        return self.store.compare_set(key, "", value).decode()


def find_place(frame: FrameType | None) -> str:
    """Returns the function that a thread executes, and the line of this program that leads to it.

    For example, `all_to_all_single at mingpt/parallel/tree_reduction.py:96`.
    """
    function = "" if frame is None else frame.f_code.co_name
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and not file.startswith(COLLECTIVES) and "/site-packages/" not in file:
            return f"{function} at {file.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{function}, called by no line of this program"


def _is_own(error: Exception) -> bool:
    """Returns whether an error is certainly this rank's own. RuntimeError is the class of all backends' errors."""
    return not isinstance(error, RuntimeError) or is_oom_error(error)
