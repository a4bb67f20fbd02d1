"""Memory of a rank without activations, with Adam: the formula for a parameters on n ranks, and a bar with one letter
per byte and parameter, measured from the storages of the tensors.

    python by_hand/memory.py

In this repository: `measure_memory` in mingpt/parallel/memory.py
"""

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

N = 4  # ranks


def train(rows):
    """Returns a parameter, its gradient and its optimizer state after a step."""
    weight = torch.ones(rows, 64, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    weight.square().sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    return [weight], [weight.grad], [state["exp_avg"], state["exp_avg_sq"]]


def show(name, formula, expected, **held):
    bar = ""
    counted = set()
    for letter, tensors in held.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in counted:  # tensors that share memory count once
                counted.add(storage.data_ptr())
                bar += letter * (storage.nbytes() // a)
    print(f"{name:26}{formula:12}{bar}")
    assert len(bar) == expected


weight, gradient, state = train(64)
a = weight[0].numel()
bucket = parameters_to_vector(gradient)
show("DDP", "20a", 20, P=weight, G=gradient, O=state, B=[bucket])
vector_to_parameters(bucket, gradient)  # from now on, the gradient is a view of the bucket
show("gradient_as_bucket_view", "16a", 16, P=weight, G=gradient, O=state, B=[bucket])
half = [weight[0].bfloat16()]  # autocast's copy, from forward to backward
show("and in half precision", "18a", 18, P=weight, G=gradient, O=state, H=half)
weight_shard, gradient_shard, state_shard = train(64 // N)
show("ZeRO-1", "8a + 8a/n", 8 + 8 / N, P=weight, G=gradient, O=state_shard)
show("ZeRO-2", "4a + 12a/n", 4 + 12 / N, P=weight, G=gradient_shard, O=state_shard)
show("ZeRO-3", "16a/n", 16 / N, P=weight_shard, G=gradient_shard, O=state_shard)
print(f"n = {N}; P parameters, G gradients, O optimizer state, B bucket, H half-precision copies")
