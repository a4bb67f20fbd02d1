"""Groups: a collective of some ranks, which the other ranks neither call nor wait for.

    torchrun --standalone --nproc_per_node=4 by_hand/groups.py

In this repository: `DistributedContext.subgroup` in mingpt/distributed/context.py
"""

import warnings

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
is_odd = rank % 2 == 1

# All ranks call new_group, members or not, in the same order: it names groups by counting them.
evens = dist.new_group([0, 2])
odds = dist.new_group([1, 3])
own = torch.tensor(rank)
dist.all_reduce(own, group=odds if is_odd else evens)  # both groups work at the same time
assert own == (1 + 3 if is_odd else 0 + 2)

# A rank outside gets no group. A collective with it warns and does nothing.
if is_odd:
    assert evens is dist.GroupMember.NON_GROUP_MEMBER
    warnings.simplefilter("ignore")
else:
    dist.barrier(evens)  # does not wait for odd ranks
evens_only = torch.tensor(rank)
dist.all_reduce(evens_only, group=evens)
assert evens_only == (rank if is_odd else 0 + 2)

# With nccl on GPUs, a gloo group beside it is for tensors on the CPU. Neither waits for the other.
on_cpu = dist.new_group(backend="gloo")
flag = torch.tensor(rank)
dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=on_cpu)
assert flag == 3

rows = [""] * 4
rank_in_evens = dist.get_rank(evens)
row = f"rank {rank}: sum of its group {own}, rank in evens {rank_in_evens:2}, sum of evens {evens_only}, flag {flag}"
dist.all_gather_object(rows, row)
if rank == 0:
    print(*rows, sep="\n")
dist.destroy_process_group()
