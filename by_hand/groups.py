"""A group is a subset of the ranks. Other ranks neither call its collectives nor wait for them.

    torchrun --standalone --nproc_per_node=4 by_hand/groups.py

In this repository: `DistributedContext.subgroup` in mingpt/distributed/context.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
is_odd = rank % 2 == 1

# All ranks call new_group in the same order, members or not, because it names groups by counting them.
evens = dist.new_group([0, 2])
odds = dist.new_group([1, 3])
own = torch.tensor(rank)
dist.all_reduce(own, group=odds if is_odd else evens)  # both groups work at the same time

# If nccl exchanges tensors on GPUs, a second group with gloo exchanges tensors on the CPU. Neither waits for the other.
on_cpu = dist.new_group(backend="gloo")
flag = torch.tensor(rank)
dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=on_cpu)

rows = [""] * 4
row = f"rank {rank}: group sum {own}, rank in evens {dist.get_rank(evens):2}, flag {flag}"
dist.all_gather_object(rows, row)
if rank == 0:
    print(*rows, sep="\n")
dist.destroy_process_group()
