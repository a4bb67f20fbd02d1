"""Pipeline parallelism by send and recv: each rank has one layer, and micro-batches pass through the ranks.
GPipe runs all forward passes first. 1F1B alternates, so a stage keeps fewer activations. Both have the same bubble.

    torchrun --standalone --nproc_per_node=3 by_hand/pipeline.py

In this repository: `PipelineParallel` in mingpt/parallel/pipeline.py
"""

import torch
import torch.distributed as dist

M = 4  # micro-batches in a step, each with one sample

dist.init_process_group("gloo")
stage, S = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # all ranks have the same weights and inputs
weights = torch.rand(S, 8, 8, requires_grad=True)  # a layer multiplies by one of these matrices
inputs = torch.rand(M, 8)
outputs = torch.linalg.multi_dot((*weights.flip(0), inputs.T))
(one_process,) = torch.autograd.grad(outputs.square().sum() / 2, weights)


def passes(ahead):
    """Returns the forward and backward passes of a stage in order. `ahead` forward passes come first."""
    order = [("F", batch) for batch in range(ahead)]
    for batch in range(M):
        order.append(("B", batch))
        if ahead + batch < M:
            order.append(("F", ahead + batch))
    return order


def receive(source):
    x = torch.zeros(8)
    dist.recv(x, source)
    return x


def run_stage(order):
    """Runs one step. Returns the gradient of this stage's weight."""
    weight = weights[stage].detach()
    gradient = torch.zeros(8, 8)
    kept = {}  # inputs of forward passes, kept until the backward pass
    sends = []
    for kind, batch in order:
        if kind == "F":
            kept[batch] = inputs[batch] if stage == 0 else receive(stage - 1)
            result = weight @ kept[batch]
            target = stage + 1
        else:
            x = kept.pop(batch)
            # The loss is half the sum of the squared outputs, so its gradient is the outputs themselves.
            of_output = weight @ x if stage == S - 1 else receive(stage + 1)
            gradient += of_output.outer(x)
            result = of_output @ weight
            target = stage - 1
        if 0 <= target < S:
            # With 1F1B, two stages send to each other at the same time, and would wait forever in `send`.
            sends.append(dist.isend(result, target))
    for send in sends:
        send.wait()
    return gradient


for schedule in "GPipe", "1F1B":
    ahead = M if schedule == "GPipe" else min(M, S - stage)
    order = passes(ahead)
    torch.testing.assert_close(run_stage(order), one_process[stage])
    rows = [""] * S
    dist.all_gather_object(rows, " ".join(f"{kind}{batch}" for kind, batch in order))
    if stage == 0:
        print(f"{schedule}: stage 0 keeps {ahead} inputs")
        print(*rows, sep="\n")
dist.destroy_process_group()
