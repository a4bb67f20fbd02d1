"""Memory of a rank without activations, with Adam: the formula for a parameters, and a bar with one letter per byte and
parameter, measured from tensors.

    python by_hand/memory.py

In this repository: `measure_memory` in mingpt/parallel/memory.py
"""

import torch


def show(name, formula, **held):
    bar = "".join(letter * (tensor.nbytes // weight.numel()) for letter, tensor in held.items())
    assert f"{len(bar)}a" == formula
    print(f"{name:25}{formula}  {bar}")


weight = torch.ones(64, 64, requires_grad=True)
optimizer = torch.optim.Adam([weight])
weight.square().sum().backward()
optimizer.step()
gradient = weight.grad
state = torch.stack((optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]))
bucket = gradient.flatten().clone()
show("DDP", "20a", P=weight, G=gradient, O=state, B=bucket)
gradient = bucket.view_as(weight)  # shares the bucket's memory
show("gradient_as_bucket_view", "16a", P=weight, G=gradient, O=state)
half = weight.bfloat16()  # autocast's copy, from forward to backward
show("and in half precision", "18a", P=weight, G=gradient, O=state, H=half)
print("P parameters, G gradients, O optimizer state, B bucket, H half-precision copies")
