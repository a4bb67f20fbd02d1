"""ZeRO: each of n ranks holds 1/n of the optimizer state (stage 1), of the gradients as well (stage 2), and of the
parameters as well (stage 3). The result is that of one process.

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
    parts = [torch.empty_like(shard) for _ in range(n)]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


def reduce_scatter(full):
    part = torch.empty_like(full.chunk(n)[rank])
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
    weight.grad = grad
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.step()
    return 2 * optimizer.state[weight]["exp_avg"].nbytes  # Adam keeps averages of the gradient and its square


def finish(stage, expected, weight, grad, own_grad):
    """Updates this rank's shard, compares with one process and prints the bytes per parameter that the rank held."""
    shard = initial.chunk(n)[rank].clone()  # a copy, so that all stages begin with the same weight
    state = update(shard, own_grad)
    assert_close(all_gather(shard), one_process)
    assert_close(all_gather(shard.grad), one_process.grad)
    held = [size / initial.numel() for size in (weight.nbytes, grad.nbytes, state)]
    assert held == expected
    if rank == 0:
        print(f"stage {stage}: parameters {held[0]:.0f}, gradients {held[1]:.0f}, optimizer state {held[2]:.0f}")


weight = initial.clone().requires_grad_()
one_process = initial.clone()
update(one_process, gradient(batch @ weight, weight))

grad = gradient(x @ weight, weight)
dist.all_reduce(grad)
finish(1, [4, 4, 8 / n], weight, grad, grad.chunk(n)[rank] / n)

grad = reduce_scatter(gradient(x @ weight, weight))  # only its part outlives backward
finish(2, [4, 4 / n, 8 / n], weight, grad, grad)

shard = initial.chunk(n)[rank].clone().requires_grad_()
grad = gradient(GatheredProduct.apply(x, shard), shard)
finish(3, [4 / n, 4 / n, 8 / n], shard, grad, grad)
dist.destroy_process_group()
