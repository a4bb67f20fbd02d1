"""Point to point: one rank sends a tensor, and another receives it into a tensor of the same shape.

    torchrun --standalone --nproc_per_node=2 by_hand/send_recv.py

In this repository: `PipelineParallel` in mingpt/parallel/pipeline.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
peer = 1 - rank

# Blocking. Rank 1 receives into its tensor.
x = torch.tensor(10 + rank)
if rank == 0:
    dist.send(x, peer)
else:
    dist.recv(x, peer)
assert x == 10

# Deadlock. Both ranks send first, and each waits until the other receives, here until a timeout.
with_timeout = dist.new_group(timeout=timedelta(seconds=2))
outcome = "sent"
try:
    dist.send(x, peer, group=with_timeout)
except RuntimeError:
    outcome = "timeout"
assert outcome == "timeout"

# Non-blocking. Both ranks send first; isend and irecv return at once.
sent = torch.tensor(10 + rank)
received = torch.zeros_like(sent)
works = [dist.isend(sent, peer), dist.irecv(received, peer)]
for work in works:
    work.wait()  # before that, do not change `sent` or read `received`
assert received == 10 + peer

rows = [""] * 2
row = f"rank {rank}: x {x}; both send first: {outcome}, with isend rank {peer}'s {received}"
dist.all_gather_object(rows, row)
if rank == 0:
    print(*rows, sep="\n")
dist.destroy_process_group()
