"""The case collectives: the time of each collective of torch.distributed, and its bus bandwidth.

by_hand/collectives.py shows what each one does. All of them exist in gloo and nccl in every supported PyTorch: gloo of
2.10 does not have all_to_all of lists, and before 2.13, all_gather_single and reduce_scatter_single had other names.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Bench, Row, median_row
from mingpt.distributed.agreement import all_gather_object

SIZES = (2**10, 2**20, 2**26)  # bytes
CALLS = 10  # number of calls in a measurement


def send_recv(x: Tensor, received: Tensor) -> None:
    """Sends to the next rank and receives from the previous one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, x, (rank + 1) % n)
    recv = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


def ring_all_reduce(parts: Tensor) -> None:
    """Sums parts, (n, N), over ranks, like by_hand/ring_all_reduce.py."""
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(parts[0])
    for step in range(2 * (n - 1)):
        part = (rank - step) % n
        send_recv(parts[part], received)
        if step < n - 1:
            parts[part - 1] += received
        else:
            parts[part - 1] = received


def collectives(bench: Bench) -> Iterator[Row]:
    """Measures each collective with tensors of SIZES bytes, and compares a ring all-reduce with the backend's.

    The bus bandwidth is the number of bytes per second that each rank sends with an algorithm that sends as few as
    possible. See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and for gather, scatter and
    sendrecv the programs there.
    """
    context = bench.context
    n = context.world_size
    most = (n - 1) / n
    for size in SIZES:
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
        where = f"{x.nbytes:,} bytes, {n} ranks, {context.backend}"
        for name, (factor, call) in calls.items():
            call()  # warms up
            seconds = max(all_gather_object(context, bench.time_calls(call, CALLS))) / CALLS
            sent = factor * x.nbytes
            what = f"{name}, {where}: {seconds:.2e} s, each rank sends {sent:,.0f} bytes"
            yield Row(what, sent / seconds / 1e9, unit=" GB/s")
        yield median_row(f"time: ring_all_reduce / all_reduce, {where}", bench.ratio(ring, all_reduce))
