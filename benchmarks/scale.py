"""What the ranks of a run ask of their store: a real store, and as many clients as the run would have ranks.

    python -m benchmarks scale --ranks 8 64 512 1024

A rank is a thread here, with connections of its own. It runs this program's code: it meets the other ranks, sends
heartbeats, finds out which rank was lost, and ends. There is no process group between them, and nothing is trained.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.collectives import print_row
from mingpt.config import DistributedConfig
from mingpt.distributed import process_group
from mingpt.distributed.launch_environment import LOOPBACK, RankInfo

RANKS = (8, 64, 512, 1024)
PHASES = ("start", "5 s of heartbeats", "a lost rank", "end")
REQUESTS = ("set", "get", "multi_get", "multi_set", "add", "append", "check", "compare_set", "delete_key", "wait")
GLOO_ERROR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9000"


def measure_scale(sizes: Sequence[int]) -> int:
    """Prints the phases of each number of ranks; returns 1 if a rank has not named the one that was lost, else 0."""
    status = 0
    print_row("ranks", "phase", "seconds", "store's CPU s", "named by", "of rank 0", "bytes", "of each other", "bytes")
    for world_size in sizes:
        for phase, *figures in measure(world_size):
            print_row(world_size, phase, *(f"{round(figure, 2):,}" for figure in figures))
            if phase == "a lost rank" and figures[2] < world_size - 1:
                status = 1
    return status


def measure(world_size: int) -> Iterator[list[Any]]:
    """Hosts a store and starts the ranks; yields each phase with its figures.

    They are seconds, those of the store's CPU, how many ranks have named the lost one, requests and bytes of rank 0,
    and the mean of those of the others. Requests are calls of the store's methods. Bytes are sent and received.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    port = listener.getsockname()[1]
    _store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # clients warn where no server of names answers
    context = get_context("forkserver")
    pipes = []
    for ranks in (range(1), range(1, world_size)):
        pipe, other_end = context.Pipe()
        context.Process(target=host_ranks, args=(other_end, ranks, world_size, port), daemon=True).start()
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()
    for phase in PHASES:
        began = time.monotonic()
        cpu_began = time.process_time()
        for pipe in pipes:
            pipe.send(phase)
        (named_by_0, *of_0), (named_by_others, *of_others) = [pipe.recv() for pipe in pipes]
        seconds = time.monotonic() - began, time.process_time() - cpu_began
        yield [phase, *seconds, named_by_0 + named_by_others, *of_0, *of_others]


def host_ranks(pipe: Connection, ranks: range, world_size: int, port: int) -> None:
    """A process of some ranks. After each phase, it sends how many have named the lost one, and means of the others."""
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # a client asks for the name of the store's host
    process_group.extend_cuda_timeout = lambda group: None  # there is no group
    calls: list[None] = []
    for name in REQUESTS:
        setattr(dist.Store, name, recorded(getattr(dist.Store, name), calls))
    lives = [live(rank, world_size) for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        pipe.send("ready")
        for _ in PHASES:
            pipe.recv()
            calls.clear()
            size = count_bytes(port)
            named = sum(pool.map(next, lives))
            pipe.send((named, len(calls) / len(ranks), (count_bytes(port) - size) / len(ranks)))


def live(rank: int, world_size: int) -> Iterator[bool]:
    """A rank: after each phase, it yields whether it has named the lost one."""
    info = RankInfo(rank, world_size, init_method="env://")
    lost = world_size // 2
    cause = ""
    with process_group.connected_ranks(info, DistributedConfig(timeout_seconds=600), ".", "gloo") as (_store, health):
        yield False
    time.sleep(5)
    if rank == lost:
        health.stop()
        time.sleep(0.1)  # for its last heartbeat
    yield False
    if rank != lost:
        cause = str(health.explain(RuntimeError(GLOO_ERROR)))
        health.stop()
    yield cause.startswith(f"rank {lost} ")
    time.sleep(1)
    yield False


def recorded(method: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    """The method, which also adds an element to `calls` each time."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    return call


def count_bytes(port: int) -> int:
    """Bytes that this process has sent to a port of this machine and received from it, by its open connections."""
    size = 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
                info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            # tcpi_bytes_received and tcpi_bytes_sent of linux/tcp.h
            size += sum(struct.unpack_from("Q", info, offset)[0] for offset in (128, 200))
    return size
