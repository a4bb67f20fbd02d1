"""ZeRO: each of n ranks holds 1/n of the optimizer state (stage 1), also of the gradients (stage 2), and also of the
parameters (stage 3). The result is the same as in one process.

    torchrun --standalone --nproc_per_node=2 by_hand/zero.py

In this repository: `FSDP` in mingpt/parallel/sharded.py
"""

import torch
import torch.distributed as dist

# An optimizer imports this. If the group already exists, default arguments in it would keep the group until Python has
# ended, and then gloo's threads can abort the process (pytorch#190489).
import torch.distributed.nn

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
batch = torch.randn(8 * n, 16)
x = batch.chunk(n)[rank]
initial = torch.randn(16, 16)


def gradient(x, weight):
    """Returns the gradient of the loss, which is half the sum of the squared outputs, averaged over samples."""
    return x.T @ (x @ weight) / len(x)


def update(weight, grad):
    """Updates a weight in place. Returns the optimizer state, the averages of the gradient and of its square."""
    weight.grad = grad
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.step()
    state = optimizer.state[weight]
    return torch.stack((state["exp_avg"], state["exp_avg_sq"]))


def all_gather(shard):
    full = torch.empty(16, 16)
    dist.all_gather(list(full.chunk(n)), shard)
    return full


def reduce_scatter(full):
    """Returns this rank's part of the mean over ranks."""
    part = torch.empty(16 // n, 16)
    dist.reduce_scatter(part, list(full.chunk(n)))
    return part / n


# Each stage returns the updated weight, and what this rank holds: parameters, gradients and optimizer state.


def stage_1():
    weight = initial.clone()
    grad = gradient(x, weight)
    dist.all_reduce(grad)
    shard = weight.chunk(n)[rank]
    state = update(shard, grad.chunk(n)[rank] / n)
    return all_gather(shard), weight, grad, state


def stage_2():
    weight = initial.clone()
    grad = reduce_scatter(gradient(x, weight))  # only this rank's part is kept after backward
    shard = weight.chunk(n)[rank]
    state = update(shard, grad)
    return all_gather(shard), weight, grad, state


def stage_3():
    shard = initial.chunk(n)[rank].clone()
    weight = all_gather(shard)  # FSDP gathers each layer for forward, and again for backward
    grad = reduce_scatter(gradient(x, weight))
    state = update(shard, grad)
    return all_gather(shard), shard, grad, state


one_process = initial.clone()
update(one_process, gradient(batch, one_process))
formulas = {"8a + 8a/n": stage_1, "4a + 12a/n": stage_2, "16a/n": stage_3}
for formula, stage in formulas.items():
    updated, *held = stage()
    torch.testing.assert_close(updated, one_process)
    if rank == 0:
        p, g, o = [tensor.nbytes // initial.numel() for tensor in held]
        print(f"{stage.__name__}  {formula:10}  {p * 'P'}{g * 'G'}{o * 'O'}")
dist.destroy_process_group()
