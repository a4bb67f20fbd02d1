"""Memory of a rank with Adam, without activations. Each row has the formula for `a` parameters, and a bar with one
letter per byte of a parameter, measured from tensors.

    python by_hand/memory.py

In this repository: the table in docs/parallelism.md
"""

import torch


def show(name, **held):
    bar = "".join(letter * (tensor.nbytes // weight.numel()) for letter, tensor in held.items())
    print(f"{name:25}{len(bar)}a  {bar}")


weight = torch.ones(64, 64, requires_grad=True)
optimizer = torch.optim.Adam([weight])
weight.square().sum().backward()
optimizer.step()
gradient = weight.grad
state = torch.stack((optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]))
bucket = gradient.flatten().clone()
show("DDP", P=weight, G=gradient, O=state, B=bucket)
gradient = bucket.view_as(weight)  # shares the bucket's memory
show("gradient_as_bucket_view", P=weight, G=gradient, O=state)
half = weight.bfloat16()  # autocast's copy, from forward to backward
show("and autocast", P=weight, G=gradient, O=state, H=half)
# The model, its gradients and buckets are in half precision. The optimizer has master weights in fp32.
show("half-precision model", P=weight, H=half, G=gradient.bfloat16(), O=state, B=bucket.bfloat16())
print("P parameters, G gradients, O optimizer state, B bucket, H half-precision parameters")
