"""The time of each collective of torch.distributed, and the bytes per second.

    torchrun --standalone --nproc_per_node=4 -m benchmarks collectives --bytes 1k 1M 64M

by_hand/collectives.py shows what they do. They use what gloo and nccl have in all supported versions of PyTorch: gloo
of 2.10 has no all_to_all of lists, and before 2.13, all_gather_single and reduce_scatter_single have other names.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Bench, machine_name, median_row
from mingpt.distributed.agreement import all_gather_object

CALLS = 10  # of each collective that is measured


def send_recv(x: Tensor, received: Tensor) -> None:
    """Each rank sends to the next one, and receives from the one before it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, x, (rank + 1) % n)
    recv = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


def ring_all_reduce(parts: Tensor) -> None:
    """As in by_hand/ring_all_reduce.py: parts is (n, N)."""
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(parts[0])
    for step in range(2 * (n - 1)):
        part = (rank - step) % n
        send_recv(parts[part], received)
        if step < n - 1:
            parts[part - 1] += received
        else:
            parts[part - 1] = received


def measure_collectives(bench: Bench, sizes: Sequence[int]) -> None:
    """Prints the mean time of each collective and its bus bandwidth, for tensors of so many bytes.

    The bus bandwidth is the bytes that each rank sends, by an algorithm that sends as few as possible, per second:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and the programs for gather, scatter, sendrecv.
    """
    context = bench.context
    n = context.world_size
    most = (n - 1) / n
    print_row(f"{machine_name(context.device)}, {n} ranks, {context.backend}")
    print_row("", "bytes", "sent per rank", "seconds", "GB/s")
    for size in sizes:
        x = torch.zeros(n, max(1, size // (4 * n)), device=context.device)
        received = torch.empty_like(x)
        sent_parts = list(x) if context.rank == 0 else None
        received_parts = list(received) if context.rank == 0 else None
        all_reduce = partial(dist.all_reduce, x)
        ring = partial(ring_all_reduce, x)
        calls = {
            "scatter": (most, partial(dist.scatter, received[0], sent_parts, src=0)),
            "gather": (most, partial(dist.gather, x[0], received_parts, dst=0)),
            "all_gather": (most, partial(dist.all_gather, list(received), x[0])),
            "reduce_scatter": (most, partial(dist.reduce_scatter, received[0], list(x))),
            "all_to_all": (most, partial(dist.all_to_all_single, received, x)),
            "broadcast": (1, partial(dist.broadcast, x, src=0)),
            "reduce": (1, partial(dist.reduce, x, dst=0)),
            "send_recv": (1, partial(send_recv, x, received)),
            "all_reduce": (2 * most, all_reduce),
            "ring_all_reduce": (2 * most, ring),
        }
        for name, (factor, call) in calls.items():
            call()  # the first call is slower
            seconds = max(all_gather_object(context, bench.time_calls(call, CALLS))) / CALLS
            sent = factor * x.nbytes
            print_row(name, f"{x.nbytes:,}", f"{sent:,.0f}", f"{seconds:.2e}", f"{sent / seconds / 1e9:.3g}")
        print_row(*median_row("ring_all_reduce in all_reduce:", bench.ratio(ring, all_reduce)).cells)


def print_row(*cells: object) -> None:
    """Prints a line of a table, on rank 0."""
    if dist.get_rank() == 0:
        print(*(f"{cell!s:16}" for cell in cells), flush=True)


def size_in_bytes(text: str) -> int:
    """Parses a size such as 64k. As in nccl-tests, k, M and G are powers of 1,024."""
    power = "kMG".find(text[-1:]) + 1
    return int(text[:-1] if power else text) * 1024**power
