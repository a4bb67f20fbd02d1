"""Point-to-point communication: one rank sends a tensor, another receives it into a tensor of the same shape.

    torchrun --standalone --nproc_per_node=2 by_hand/send_recv.py

In this repository: `PipelineParallel` in mingpt/parallel/pipeline.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
peer = 1 - rank

# Blocking. Rank 0, a teacher, sends probabilities to rank 1, a student, whose loss is cross_entropy(logits, x). Rank 1
# does not know the shape, so rank 0 sends the shape first.
if rank == 0:
    x = torch.eye(2, 3).softmax(1)
    dist.send(torch.tensor(x.shape), peer)
    dist.send(x, peer)
else:
    shape = torch.zeros(2, dtype=torch.int64)
    dist.recv(shape, peer)
    x = torch.zeros(shape.tolist())
    dist.recv(x, peer)

# Deadlock. Both ranks send first, and each waits until the other receives, here until a timeout.
with_timeout = dist.new_group(timeout=timedelta(seconds=2))
try:
    dist.send(x, peer, group=with_timeout)
    outcome = "sent"
except RuntimeError:
    outcome = "timeout"

# Non-blocking. Both ranks send first; isend and irecv return at once. Tags tell two exchanges apart (not with nccl).
a, b = torch.zeros(2)
works = [
    dist.isend(torch.tensor(10.0), peer, tag=1),
    dist.isend(torch.tensor(20.0), peer, tag=2),
    dist.irecv(b, peer, tag=2),
    dist.irecv(a, peer, tag=1),
]
for work in works:
    work.wait()  # before this, sent tensors must not be changed, nor received ones read

if rank == 1:
    print(f"received probabilities {x.mul(100).int().tolist()} %; both send first: {outcome}; tag 1: {a}, tag 2: {b}")
dist.destroy_process_group()
