"""Pipeline parallelism by send and recv: each rank has one layer, and micro-batches pass through the ranks.
GPipe runs all forward passes first. 1F1B alternates, so a stage keeps fewer activations. Both have the same bubble.

    torchrun --standalone --nproc_per_node=4 by_hand/pipeline.py

In this repository: `PipelineParallel` in mingpt/parallel/pipeline.py
"""

import torch
import torch.distributed as dist

M = 6  # micro-batches in a step, each with one sample

dist.init_process_group("gloo")
stage, S = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # all ranks have the same weights and inputs
weights = torch.rand(S, 8, 8, requires_grad=True)  # a layer multiplies by one of these matrices
inputs = torch.rand(M, 8)
outputs = torch.linalg.multi_dot((*weights.flip(0), inputs.T))
(one_process,) = torch.autograd.grad(outputs.square().sum() / 2, weights)


def run_stage(ahead):
    """Runs one step, with forward passes `ahead` of backward passes. Returns this stage's time slots and gradient.

    The loss is half the sum of the squared outputs, so its gradient with respect to the outputs is the outputs.
    """
    weight = weights[stage].detach()
    gradient = torch.zeros(8, 8)
    kept = []  # inputs of forward passes, until their backward passes
    slots = []  # one pass, or waiting, in each slot of time
    sends = []
    message = torch.zeros(9)  # an activation or gradient, then the first slot that can use it
    for kind in "F" * ahead + "BF" * (M - ahead) + "B" * ahead:
        batch = "".join(slots).count(kind)  # number of the micro-batch: each pass of a kind takes the next one
        to = 1 if kind == "F" else -1
        if 0 <= stage - to < S:
            dist.recv(message, stage - to)
        if kind == "F":
            kept.append(message[:8].clone() if stage else inputs[batch])
            result = weight @ kept[-1]
        else:
            x = kept.pop(0)
            of_output = message[:8] if stage < S - 1 else weight @ x
            gradient += of_output.outer(x)
            result = of_output @ weight
        slots += [".."] * (int(message[8]) - len(slots)) + [f"{kind}{batch}"]
        if 0 <= stage + to < S:
            # With 1F1B, two stages send to each other at the same time, and would wait forever in `send`.
            sends.append(dist.isend(torch.cat((result, torch.tensor([len(slots)]))), stage + to))
    for send in sends:
        send.wait()
    return slots, gradient


for schedule, ahead in ("GPipe", M), ("1F1B", S - stage):
    slots, gradient = run_stage(ahead)
    torch.testing.assert_close(gradient, one_process[stage])
    rows = [None] * S
    dist.all_gather_object(rows, slots)
    end = max(map(len, rows))
    idle = (end - 2 * M) / end
    assert idle == (S - 1) / (M + S - 1)
    if stage == 0:
        print(f"{schedule}: each stage waits in {end - 2 * M} of {end} slots, {idle:.1%}; stage 0 keeps {ahead} inputs")
        for row in rows:
            print(*row, *[".."] * (end - len(row)))
dist.destroy_process_group()
