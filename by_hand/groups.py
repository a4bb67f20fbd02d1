"""A group is a subset of the ranks. Other ranks neither call its collectives nor wait for them.

    torchrun --standalone --nproc_per_node=4 by_hand/groups.py

In this repository: `DistributedContext.subgroup` in mingpt/distributed/context.py
"""

import warnings

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
assert own == (1 + 3 if is_odd else 0 + 2)

# A rank that is not a member gets a placeholder. A collective with the placeholder warns and does nothing.
if is_odd:
    assert evens is dist.GroupMember.NON_GROUP_MEMBER
    warnings.simplefilter("ignore")
else:
    dist.barrier(evens)  # does not wait for the odd ranks
evens_only = torch.tensor(rank)
dist.all_reduce(evens_only, group=evens)
assert evens_only == (rank if is_odd else 0 + 2)

# If nccl exchanges tensors on GPUs, a second group with gloo exchanges tensors on the CPU. Neither waits for the other.
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
