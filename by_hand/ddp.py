"""DistributedDataParallel: hooks notice which gradients are ready. As soon as all gradients of a bucket are ready, the
bucket is all-reduced, while backward continues with earlier layers.

    torchrun --standalone --nproc_per_node=2 by_hand/ddp.py

In this repository: `DDP` in mingpt/parallel/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
parameters = list(model.parameters())
names = {p: name for name, p in model.named_parameters()}
model.register_buffer("buffer", torch.tensor(rank))  # part of the model, but not trained

# Each rank has drawn different weights; training begins with the weights of rank 0. Like DDP, this changes the
# parameters in place, so the optimizer may be built before or after it. DDP copies the buffers before each forward
# pass, since gradients do not keep them equal.
for tensor in model.state_dict().values():  # parameters and buffers
    dist.broadcast(tensor, src=0)
assert model.buffer == 0

# Backward begins with the last layer, so buckets take the parameters in reverse order. A bucket has three parameters
# here, and 25 MiB in DDP.
backward_order = parameters[::-1]
waiting = [backward_order[i : i + 3] for i in range(0, len(parameters), 3)]
sent = []


def on_ready(p):
    """Called by backward when the gradient of p is complete."""
    event = f"{names[p]} is ready"
    # All ranks must send the buckets in the same order, so a bucket that is ready waits for the buckets before it.
    while waiting and all(p.grad is not None for p in waiting[0]):
        event += f", bucket {len(sent)} is ready: all_reduce starts"
        bucket = waiting.pop(0)
        flat = parameters_to_vector(p.grad for p in bucket)
        sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
    if rank == 0:
        print(event)


# The whole batch, the same on all ranks. Each rank takes its share of five samples.
x, y = torch.randn(2, n, 5, 4, generator=torch.Generator().manual_seed(0))
for p in parameters:
    p.register_post_accumulate_grad_hook(on_ready)
mse_loss(model(x[rank]), y[rank]).backward()
assert not waiting  # backward has sent all buckets
for bucket, flat, work in sent:
    work.wait()
    vector_to_parameters(flat / n, [p.grad for p in bucket])

one_process = torch.autograd.grad(mse_loss(model(x), y), parameters)
for p, expected in zip(parameters, one_process, strict=True):
    torch.testing.assert_close(p.grad, expected)
if rank == 0:
    print("equal to one process with the whole batch")
dist.destroy_process_group()
