"""Collectives are operations that all ranks call together. This program prints the result on each rank.

    torchrun --standalone --nproc_per_node=3 by_hand/collectives.py

In this repository: `DistributedContext` in mingpt/distributed/context.py
"""

import torch
import torch.distributed as dist


def show(name, result):
    """Prints the results of all ranks in a row."""
    text = "-" if result is None else str(result.tolist())
    row = [""] * n
    dist.all_gather_object(row, f"{text:>12}")
    if rank == 0:
        print(f"{name:14}", *row)


dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
mine = 10 * rank + torch.arange(n)
show("before", mine)

x = mine.clone()
dist.broadcast(x, src=0)
show("broadcast", x)

x = mine.clone()
dist.reduce(x, dst=0)
show("reduce", x if rank == 0 else None)  # on other ranks, x may be a partial sum

part = torch.zeros_like(mine[0])
dist.scatter(part, list(mine) if rank == 0 else None, src=0)
show("scatter", part)

parts = torch.zeros_like(mine)
dist.gather(mine[rank], list(parts) if rank == 0 else None, dst=0)
show("gather", parts if rank == 0 else None)

dist.all_gather(list(parts), mine[rank])
show("all_gather", parts)

dist.all_to_all_single(parts, mine)
show("all_to_all", parts)

x = mine.clone()
dist.all_reduce(x)
show("all_reduce", x)
show("mean", x // n)  # floating-point tensors also have ReduceOp.AVG

dist.reduce_scatter(part, list(mine))
show("reduce_scatter", part)
dist.all_gather(list(parts), part)
show("+ all_gather", parts)

# Softmax of x / 10 for the numbers x of all ranks. It subtracts the maximum, since exp could overflow.
largest = mine.max()
work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)  # returns at once
work.wait()  # before this, `largest` must not be read or changed
show("MAX", largest)
x = torch.exp((mine - largest) / 10)
total = x.sum()
dist.all_reduce(total)
show("softmax, %", (100 * x / total).int())
dist.destroy_process_group()
