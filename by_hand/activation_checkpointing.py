"""Activation checkpointing: forward keeps only the input of each block, and backward runs the block once more.

    python by_hand/activation_checkpointing.py

In this repository: `apply_activation_checkpointing` in mingpt/parallel/activation_checkpointing.py
"""

import torch
from torch import nn


class Checkpoint(torch.autograd.Function):
    """Calls a block without autograd in forward, and again with autograd in backward."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(grad)
        return None, x.grad


blocks = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(8)]
passes = []
for block in blocks:
    block.register_forward_pre_hook(lambda *_: passes.append(1))


def train(run):
    """Returns the input's gradient, the KiB that autograd keeps for backward, and the number of passes."""
    kept = {}

    def keep(tensor):
        if len(tensor) == len(batch):  # an activation; other tensors are weights
            kept[tensor.data_ptr()] = tensor.nbytes // 1024
        return tensor

    passes.clear()
    batch = torch.ones(32, 64, requires_grad=True)
    x = batch
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for block in blocks:
            x = run(block, x)
    x.sum().backward()
    return batch.grad, sum(kept.values()), len(passes)


expected, all_kept, once = train(nn.Module.__call__)
gradient, kept, twice = train(Checkpoint.apply)
assert torch.equal(gradient, expected)
assert all_kept == 8 * (8 + 32)  # KiB of the inputs of both linear layers of each block
assert kept == 8 * 8  # KiB of the input of each block
assert (once, twice) == (8, 16)
print(f"""\
                KiB kept for backward   forward passes through a block
without         {all_kept:21}{once:33}
checkpointing   {kept:21}{twice:33}""")
