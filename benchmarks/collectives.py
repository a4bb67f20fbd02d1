"""The collectives of torch.distributed, a function each: what every rank has before and after it, and how fast it is.

    torchrun --standalone --nproc_per_node=4 -m benchmarks collectives
    torchrun --standalone --nproc_per_node=4 -m benchmarks collectives --bytes 1k 1M 64M

All n ranks call a function together, each with its own tensor x, (n, N), whose rows are its n parts. A function returns
what its rank has afterwards. They use what gloo and nccl have in all supported versions of PyTorch: gloo of 2.10 has no
all_to_all of lists, and before 2.13, all_gather_single and reduce_scatter_single have other names.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Bench, machine_name, median_row
from mingpt.distributed.collectives import DistributedContext

CALLS = 10  # of each collective that is measured


def broadcast(x: Tensor) -> Tensor:
    """All ranks get the tensor of rank 0."""
    dist.broadcast(x, src=0)
    return x


def reduce(x: Tensor) -> Tensor:
    """Rank 0 gets the sum of all tensors."""
    dist.reduce(x, dst=0)
    return x if dist.get_rank() == 0 else x[:0]  # on other ranks, x may be the sum of some tensors


def all_reduce(x: Tensor) -> Tensor:
    """All ranks get the sum of all tensors."""
    dist.all_reduce(x)
    return x


def scatter(x: Tensor) -> Tensor:
    """Rank r gets part r of rank 0."""
    part = torch.empty_like(x[0])
    dist.scatter(part, list(x) if dist.get_rank() == 0 else None, src=0)
    return part


def gather(x: Tensor) -> Tensor:
    """Rank 0 gets part r of each rank r."""
    rank = dist.get_rank()
    gathered = torch.empty_like(x)
    dist.gather(x[rank], list(gathered) if rank == 0 else None, dst=0)
    return gathered if rank == 0 else x[:0]


def all_gather(x: Tensor) -> Tensor:
    """All ranks get part r of each rank r."""
    gathered = torch.empty_like(x)
    dist.all_gather(list(gathered), x[dist.get_rank()])
    return gathered


def reduce_scatter(x: Tensor) -> Tensor:
    """Rank r gets part r of the sum of all tensors."""
    part = torch.empty_like(x[0])
    dist.reduce_scatter(part, list(x))
    return part


def all_to_all(x: Tensor) -> Tensor:
    """Rank r gets part r of all ranks."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def send_recv(x: Tensor) -> Tensor:
    """Each rank gets the tensor of the rank before it, rank 0 that of the last.

    `dist.send` waits until the tensor is sent: if all ranks called it before `dist.recv`, all could wait forever.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % n)
    recv = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()
    return received


def barrier(x: Tensor) -> Tensor:
    """No rank continues before all have arrived. Returns the number that had, which the store counts."""
    store = dist.distributed_c10d._get_default_store()
    store.add("arrived", 1)
    dist.barrier()
    return x.new_tensor([store.add("arrived", 0)])


def new_group(x: Tensor) -> Tensor:
    """Even and odd ranks are two groups, which work at the same time. Each rank gets the sum of its group."""
    n = dist.get_world_size()
    groups = [dist.new_group(list(range(first, n, 2))) for first in (0, 1)]  # all ranks create both
    dist.all_reduce(x, group=groups[dist.get_rank() % 2])
    return x


def ring_all_reduce(x: Tensor) -> Tensor:
    """All ranks get the sum of all tensors, by send and recv.

    In each step, a rank sends one part to the next rank. In the first n - 1 steps that rank adds it to its own, until
    each rank has one part of the sum; in as many again it copies it.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(2 * (n - 1)):
        received = send_recv(x[(rank - step) % n])
        part = x[(rank - step - 1) % n]
        if step < n - 1:
            part += received
        else:
            part.copy_(received)
    return x


def expected_results(before: Tensor) -> dict[Callable[[Tensor], Tensor], Tensor]:
    """What each collective makes of (rank, part): a row for each rank, or one that is the same for all."""
    total = before.sum(0)
    own_parts = before.diagonal()
    n = len(before)
    return {
        broadcast: before[0],
        reduce: total,
        all_reduce: total,
        scatter: before[0, :, None],
        gather: own_parts,
        all_gather: own_parts,
        reduce_scatter: total[:, None],
        all_to_all: before.T,
        send_recv: before.roll(1, 0),
        barrier: torch.tensor([n]),
        new_group: torch.stack([before[rank % 2 :: 2].sum(0) for rank in range(n)]),
        ring_all_reduce: total,
    }


def show_collectives(context: DistributedContext) -> int:
    """Prints what all ranks have before and after each collective; returns 1 if any of it is wrong, else 0."""
    ranks = torch.arange(context.world_size)
    before = 10 * ranks[:, None] + ranks
    print_row("", *(f"rank {rank}" for rank in ranks))
    print_row("before", *before.tolist())
    status = 0
    for collective, expected in expected_results(before).items():
        x = before[context.rank, :, None].to(context.device, copy=True)
        after = context.all_gather_object(collective(x).flatten().tolist())
        print_row(collective.__name__, *after)
        if not (torch.tensor([row for row in after if row]) == expected).all():
            status = 1
            print_row("WRONG, expected:", *expected.tolist())
    return status


def measure_collectives(bench: Bench, sizes: Sequence[int]) -> None:
    """Prints the mean time of each collective and its bus bandwidth, for tensors of so many bytes.

    The bus bandwidth is the bytes that each rank sends, by an algorithm that sends as few as possible, per second:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, and the programs for gather, scatter, sendrecv.
    """
    context = bench.context
    n = context.world_size
    most = (n - 1) / n
    factors = dict.fromkeys([scatter, gather, all_gather, reduce_scatter, all_to_all], most)
    factors |= {broadcast: 1, reduce: 1, send_recv: 1, all_reduce: 2 * most, ring_all_reduce: 2 * most}
    print_row(f"{machine_name(context.device)}, {n} ranks, {context.backend}")
    print_row("", "bytes", "sent per rank", "seconds", "GB/s")
    for size in sizes:
        x = torch.zeros(n, max(1, size // (4 * n)), device=context.device)
        for collective, factor in factors.items():
            call = partial(collective, x)
            call()  # the first call is slower
            seconds = max(context.all_gather_object(bench.time_calls(call, CALLS))) / CALLS
            sent = factor * x.nbytes
            figures = f"{x.nbytes:,}", f"{sent:,.0f}", f"{seconds:.2e}", f"{sent / seconds / 1e9:.3g}"
            print_row(collective.__name__, *figures)
        ratios = bench.ratio(partial(ring_all_reduce, x), partial(all_reduce, x))
        print_row(*median_row("ring_all_reduce in all_reduce:", ratios).cells)


def print_row(*cells: object) -> None:
    """Prints a line of a table, on rank 0."""
    if dist.get_rank() == 0:
        print(*(f"{cell!s:16}" for cell in cells), flush=True)


def size_in_bytes(text: str) -> int:
    """Parses a size such as 64k. As in nccl-tests, k, M and G are powers of 1,024."""
    power = "kMG".find(text[-1:]) + 1
    return int(text[:-1] if power else text) * 1024**power
