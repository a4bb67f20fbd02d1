"""Ring all-reduce: in each step, every rank sends one part to the next rank, until all ranks have the whole sum.

    torchrun --standalone --nproc_per_node=3 by_hand/ring_all_reduce.py

In this repository: `DDP` in mingpt/parallel/ddp.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
x = 10 * rank + torch.arange(n)
total = x.clone()
dist.all_reduce(total)

rows = [""] * n
for step in range(2 * (n - 1)):
    part = (rank - step) % n
    received = torch.zeros_like(x[part])
    work = dist.isend(x[part], (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    work.wait()
    if step < n - 1:
        phase = "reduce-scatter"  # at its end, each rank has one complete part of the sum
        x[part - 1] += received  # part -1 is the last part, which precedes part 0
    else:
        phase = "all-gather"
        x[part - 1] = received
    dist.all_gather_object(rows, f"{x.tolist()!s:>12}")
    if rank == 0:
        print(f"{phase:14}", *rows)

assert torch.equal(x, total)
if rank == 0:
    print(f"{step + 1} steps: a rank sends its tensor {2 * (n - 1) / n:.2f} times, a parameter server {n} times")
dist.destroy_process_group()
