"""Memory of a rank without activations, with Adam: the formula for a parameters on n ranks, and a bar with one letter
per byte and parameter, measured from the storages of the tensors.

    python by_hand/memory.py

In this repository: `measure_memory` in mingpt/parallel/memory.py
"""

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

N = 4  # ranks


def train(rows):
    """Returns parameters, gradients and optimizer state after a step."""
    parameters = [torch.ones(rows, 64, requires_grad=True) for _ in range(4)]
    optimizer = torch.optim.Adam(parameters)
    sum(p.square().sum() for p in parameters).backward()
    optimizer.step()
    state = [t for tensors in optimizer.state.values() for t in tensors.values() if t.dim()]
    return parameters, [p.grad for p in parameters], state


def show(name, formula, expected, **held):
    bar = ""
    storages = {}  # address -> bytes, so tensors that share memory count once
    for letter, tensors in held.items():
        before = sum(storages.values())
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        bar += letter * round((sum(storages.values()) - before) / a)
    print(f"{name:26}{formula:12}{bar}")
    assert sum(storages.values()) == expected * a


weights, gradients, state = train(64)
a = sum(p.numel() for p in weights)
bucket = parameters_to_vector(gradients)
show("DDP", "20a", 20, P=weights, G=gradients, O=state, B=[bucket])
vector_to_parameters(bucket, gradients)  # from now on, gradients are views of the bucket
show("gradient_as_bucket_view", "16a", 16, P=weights, G=gradients, O=state, B=[bucket])
half = [p.bfloat16() for p in weights]  # autocast's copies, from forward to backward
show("and in half precision", "18a", 18, P=weights, G=gradients, O=state, H=half)
weight_shards, gradient_shards, state_shards = train(64 // N)
show("ZeRO-1", "8a + 8a/n", 8 + 8 / N, P=weights, G=gradients, O=state_shards)
show("ZeRO-2", "4a + 12a/n", 4 + 12 / N, P=weights, G=gradient_shards, O=state_shards)
show("ZeRO-3", "16a/n", 16 / N, P=weight_shards, G=gradient_shards, O=state_shards)
print(f"n = {N}; P parameters, G gradients, O optimizer state, B bucket, H half-precision copies")
