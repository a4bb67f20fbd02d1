"""ZeRO: each of n ranks holds 1/n of the optimizer state (stage 1), also of the gradients (stage 2), and also of the
parameters (stage 3). The result is the same as in one process.

    torchrun --standalone --nproc_per_node=2 by_hand/zero.py

In this repository: `FSDP` in mingpt/parallel/sharded.py
"""

import torch
import torch.distributed as dist
from torch.testing import assert_close

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
batch = torch.randn(n, 8, 16)
x = batch[rank]
initial = torch.randn(16, 16)


def all_gather(shard):
    full = torch.empty(16, 16)
    dist.all_gather(list(full.chunk(n)), shard)
    return full


def reduce_scatter(full):
    part = torch.empty(16 // n, 16)
    dist.reduce_scatter(part, list(full.chunk(n)))
    return part / n


class GatheredProduct(torch.autograd.Function):
    """Stage 3: gathers a weight, computes with it and discards it, in forward and again in backward."""

    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)
        return x @ all_gather(shard)

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        return grad @ all_gather(shard).T, reduce_scatter(x.T @ grad)


def gradient(product, weight):
    return torch.autograd.grad(product.sigmoid().mean(), weight)[0]


def update(weight, grad):
    """Updates a weight in place. Returns the bytes of the optimizer state: averages of the gradient and its square."""
    weight.grad = grad
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.step()
    return 2 * optimizer.state[weight]["exp_avg"].nbytes


def finish(stage, weight, grad, my_grad):
    """Updates this rank's shard, compares it with one process and prints the bytes per parameter that the rank held."""
    shard = initial.chunk(n)[rank].clone()
    state = update(shard, my_grad)
    assert_close(all_gather(shard), one_process)
    assert_close(all_gather(shard.grad), one_process.grad)
    if rank == 0:
        parameters, gradients, state = (size // 16**2 for size in (weight.nbytes, grad.nbytes, state))
        print(f"stage {stage}: parameters {parameters}, gradients {gradients}, optimizer state {state}")


weight = initial.clone().requires_grad_()
one_process = initial.clone()
update(one_process, gradient(batch @ weight, weight))

grad = gradient(x @ weight, weight)
dist.all_reduce(grad)
finish(1, weight, grad, grad.chunk(n)[rank] / n)

grad = reduce_scatter(gradient(x @ weight, weight))  # only this rank's part outlives backward
finish(2, weight, grad, grad)

shard = initial.chunk(n)[rank].clone().requires_grad_()
grad = gradient(GatheredProduct.apply(x, shard), shard)
finish(3, shard, grad, grad)
dist.destroy_process_group()
