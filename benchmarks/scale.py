"""What the ranks of a run ask of their store: a real store, and as many clients as the run would have ranks.

    python -m benchmarks scale

A rank is a thread here, with connections of its own. It runs this program's code: it meets the other ranks, sends
heartbeats, finds out which rank was lost, and ends. There is no process group between them, and nothing is trained.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.collectives import print_row
from mingpt.config.schema import DistributedConfig
from mingpt.distributed import process_group
from mingpt.distributed.launcher import LOOPBACK, RankInfo, allow_connections

RANKS = (8, 64, 512, 1024)
PROCESSES = 4  # of all ranks but rank 0, which has one of its own
PHASES = ("start", "2 s of heartbeats", "a lost rank", "end")
METHODS = ("set", "get", "multi_get", "multi_set", "add", "append", "check", "compare_set", "delete_key", "wait")
calls: list[None] = []  # an element for each call of a store's methods in this process


def measure_scale() -> None:
    """Prints the phases of each number of ranks.

    Raises:
        UserError: this process may not open as many files.
    """
    allow_connections(RankInfo(0, max(RANKS)))
    print_row("ranks", "phase", "named by", "seconds", "store's CPU s", "of rank 0:", "bytes", "of others:", "bytes")
    for world_size in RANKS:
        for phase, named, *figures in measure(world_size):
            print_row(world_size, phase, named, *(f"{figure:,.2f}" for figure in figures))


def measure(world_size: int) -> Iterator[list[Any]]:
    """Hosts a store and starts ranks; yields each phase with its figures.

    They are how many ranks have named the one that was lost, seconds, seconds of the store's CPU, requests and bytes of
    rank 0, and the mean of those of the others. Requests are calls of a store's methods. Bytes are sent and received.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    port = listener.getsockname()[1]
    _store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # clients warn where no server of names answers
    context = get_context("forkserver")
    pipes = []
    for ranks in (range(1), *(range(first, world_size, PROCESSES) for first in range(1, PROCESSES + 1))):
        pipe, other_end = context.Pipe()
        context.Process(target=host_ranks, args=(other_end, ranks, world_size, port), daemon=True).start()
        other_end.close()
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()
    for phase in PHASES:
        began = time.monotonic()
        cpu_began = time.process_time()
        for pipe in pipes:
            pipe.send(phase)
        (named_by_0, *of_0), *of_others = [pipe.recv() for pipe in pipes]
        seconds = time.monotonic() - began, time.process_time() - cpu_began
        named, requests, size = (sum(figures) for figures in zip(*of_others, strict=True))
        yield [phase, named_by_0 + named, *seconds, *of_0, requests / (world_size - 1), size / (world_size - 1)]


def host_ranks(pipe: Connection, ranks: range, world_size: int, port: int) -> None:
    """A process of some ranks. After each phase, it sends how many named the lost one, and their requests and bytes."""
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # a client asks for the name of the store's host
    process_group.extend_cuda_timeout = lambda group: None  # there is no group
    sys.setswitchinterval(1.0)  # as often, each thread that waits for the interpreter's lock wakes up
    for name in METHODS:
        setattr(dist.Store, name, partialmethod(recorded, getattr(dist.Store, name)))
    lives = [live(rank, world_size) for rank in ranks]
    with ThreadPoolExecutor(world_size) as pool:
        pipe.send("ready")
        for _ in PHASES:
            pipe.recv()
            calls.clear()
            size = count_bytes(port)
            named = sum(pool.map(next, lives))
            pipe.send((named, len(calls), count_bytes(port) - size))


def recorded(store: dist.Store, method: Callable[..., Any], *args: Any) -> Any:
    """Calls a method of a store."""
    calls.append(None)
    return method(store, *args)


def live(rank: int, world_size: int) -> Iterator[bool]:
    """A rank: after each phase, it yields whether it has named the lost one."""
    info = RankInfo(rank, world_size, init_method="env://")
    lost = world_size // 2
    cause = ""
    with process_group.connected_ranks(info, DistributedConfig(timeout_seconds=600), ".", "gloo") as (_store, health):
        yield False
    time.sleep(2)
    if rank == lost:
        health.stop()
        time.sleep(0.1)  # for its last heartbeat
    yield False
    if rank != lost:
        cause = str(health.explain(RuntimeError("gloo: Connection closed by peer [127.0.0.1]:9000")))
        health.stop()
    yield cause.startswith(f"rank {lost} ")
    time.sleep(0.5)
    yield False


def count_bytes(port: int) -> int:
    """Bytes that this process has sent to a port of this machine and received from it, by its open connections."""
    size = 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr[1:] == (port,):
            with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
                info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            size += sum(struct.unpack("128xQ64xQ", info))  # bytes_received and bytes_sent of linux/tcp.h
    return size
