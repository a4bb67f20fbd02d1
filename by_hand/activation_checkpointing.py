"""Activation checkpointing: forward keeps only the input of each block, and backward runs the block once more.

    python by_hand/activation_checkpointing.py

In this repository: `apply_activation_checkpointing` in mingpt/parallel/activation_checkpointing.py
"""

import torch


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
        y.backward(grad)  # also adds to the gradients of the block's weights, if there are any
        return None, x.grad


passes = []
kept = []


def block(x):
    passes.append(x)
    return x.sin().sin().sin().sin()  # for backward, autograd keeps the input of each sin


def keep(tensor):
    kept.append(tensor)
    return tensor


def train(title, run):
    """Runs eight blocks, and prints what autograd keeps. Returns the gradient of the input."""
    passes.clear()
    kept.clear()
    start = torch.ones(32, 64, requires_grad=True)
    x = start
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(8):
            x = run(x)
    x.sum().backward()
    print(f"{title:16}{len(kept):25}{len(passes):27}")
    return start.grad


print("                tensors kept for backward   forward passes of blocks")
expected = train("without", block)
gradient = train("checkpointing", lambda x: Checkpoint.apply(block, x))
assert torch.equal(gradient, expected)
