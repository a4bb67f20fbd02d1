"""Collectives are operations that all ranks call together. This program prints the result on each rank.

    torchrun --standalone --nproc_per_node=4 by_hand/collectives.py

In this repository: `DistributedContext` in mingpt/distributed/context.py
"""

import torch
import torch.distributed as dist


def show(name, after, expected, only_on_rank_0=False):
    """Checks this rank's result, and prints the results of all ranks."""
    text = "-"
    if rank == 0 or not only_on_rank_0:
        assert torch.equal(after, expected), name
        text = str(after.tolist())
    row = [""] * n
    dist.all_gather_object(row, f"{text:>16}")
    if rank == 0:
        print(f"{name:14}", *row)


dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
before = 10 * torch.arange(n)[:, None] + torch.arange(n)  # (rank, part)
mine = before[rank]
total = before.sum(0)
show("before", mine, mine)

x = mine.clone()
dist.broadcast(x, src=0)
show("broadcast", x, before[0])

x = mine.clone()
dist.reduce(x, dst=0)
show("reduce", x, total, only_on_rank_0=True)  # on other ranks, x may be a partial sum

part = torch.zeros_like(mine[0])
dist.scatter(part, list(mine) if rank == 0 else None, src=0)
show("scatter", part, before[0, rank])

parts = torch.zeros_like(mine)
dist.gather(mine[rank], list(parts) if rank == 0 else None, dst=0)
show("gather", parts, before.diagonal(), only_on_rank_0=True)

dist.all_gather(list(parts), mine[rank])
show("all_gather", parts, before.diagonal())

dist.all_to_all_single(parts, mine.clone())
show("all_to_all", parts, before[:, rank])

x = mine.clone()
dist.all_reduce(x)
show("all_reduce", x, total)

dist.reduce_scatter(part, list(mine))
show("reduce_scatter", part, total[rank])
dist.all_gather(list(parts), part)
show("+ all_gather", parts, total)  # together, they are an all_reduce

x = mine.clone()
work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)  # returns at once
work.wait()  # before that, neither read nor change x
show("MAX", x, before[-1])
dist.destroy_process_group()
