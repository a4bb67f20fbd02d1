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

# Blocking. Rank 1 does not know the shape, so rank 0 sends it first.
if rank == 0:
    x = torch.ones(2, 3)
    dist.send(torch.tensor(x.shape), peer)
    dist.send(x, peer)
else:
    shape = torch.zeros(2, dtype=torch.int64)  # both ranks know the number of dimensions
    dist.recv(shape, peer)
    x = torch.zeros(*shape)
    dist.recv(x, peer)
assert torch.equal(x, torch.ones(2, 3))

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
row = f"rank {rank}: shape {[*x.shape]}; both send first: {outcome}, with isend rank {peer}'s {received}"
dist.all_gather_object(rows, row)
if rank == 0:
    print(*rows, sep="\n")
dist.destroy_process_group()
