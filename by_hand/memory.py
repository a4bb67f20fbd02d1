"""Memory of a rank without activations, with Adam: the formula for a parameters on n ranks, and a bar with one letter
per byte and parameter, measured from tensors.

    python by_hand/memory.py

In this repository: `measure_memory` in mingpt/parallel/memory.py
"""

import torch

N = 4  # ranks


def train(weight):
    """Returns the gradient and the optimizer state of a step."""
    weight.requires_grad_()
    optimizer = torch.optim.Adam([weight])
    weight.square().sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    return weight.grad, torch.stack((state["exp_avg"], state["exp_avg_sq"]))


def show(name, formula, expected, **held):
    bar = "".join(letter * (tensor.nbytes // a) for letter, tensor in held.items())
    assert len(bar) == expected
    print(f"{name:26}{formula:12}{bar}")


weight = torch.ones(64, 64)
a = weight.numel()
shard = weight.chunk(N)[0].clone()  # of rank 0
gradient, state = train(weight)
bucket = gradient.flatten().clone()
show("DDP", "20a", 20, P=weight, G=gradient, O=state, B=bucket)
gradient = bucket.view_as(weight)  # shares the bucket's memory
assert gradient.data_ptr() == bucket.data_ptr()
show("gradient_as_bucket_view", "16a", 16, P=weight, G=gradient, O=state)
half = weight.bfloat16()  # autocast's copy, from forward to backward
show("and in half precision", "18a", 18, P=weight, G=gradient, O=state, H=half)
gradient_shard, state_shard = train(shard)
show("ZeRO-1", "8a + 8a/n", 8 + 8 / N, P=weight, G=gradient, O=state_shard)
show("ZeRO-2", "4a + 12a/n", 4 + 12 / N, P=weight, G=gradient_shard, O=state_shard)
show("ZeRO-3", "16a/n", 16 / N, P=shard, G=gradient_shard, O=state_shard)
print(f"n = {N}; P parameters, G gradients, O optimizer state, B bucket, H half-precision copies")
