"""Pipeline parallelism by send and recv: each rank has one layer, and micro-batches pass through the ranks.
GPipe runs all forward passes first. 1F1B alternates, so a stage keeps fewer activations. Both have the same bubble.

    torchrun --standalone --nproc_per_node=4 by_hand/pipeline.py

In this repository: `PipelineParallel` in mingpt/parallel/pipeline.py
"""

import torch
import torch.distributed as dist

M = 6  # micro-batches in a step, each with one sample

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # all ranks have the same weights and inputs
weights = torch.rand(4, 8, 8, requires_grad=True)  # a layer is a product with one of these matrices
inputs = torch.rand(M, 8)


def run_stage(S, stage, ahead):
    """A step of a stage whose forward passes are `ahead` of its backward passes: returns its time slots and gradient.

    The loss is the sum of half the squared outputs, so its gradient with respect to the outputs is the outputs.
    """
    weight = weights[stage].detach()
    gradient = torch.zeros(8, 8)
    kept = []  # inputs of forward passes, until their backward passes
    slots = []  # what the stage does in each slot of time; a pass takes one
    sends = []
    message = torch.zeros(9)  # an activation or gradient, then the first slot that can use it
    for kind in "F" * ahead + "BF" * (M - ahead) + "B" * ahead:
        batch = "".join(slots).count(kind)  # the micro-batch: each pass of a kind takes the next one
        to = 1 if kind == "F" else -1
        if 0 <= stage - to < S:
            dist.recv(message, rank - to)
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
            # With 1F1B, two stages send to each other at the same time. If both waited in `send`, none would receive.
            sends.append(dist.isend(torch.cat((result, torch.tensor([len(slots)]))), rank + to))
    for send in sends:
        send.wait()
    return slots, gradient


for S in 2, 4:  # with 2 stages, ranks 2 and 3 are a second pipeline
    stage = rank % S
    for schedule, ahead in ("GPipe", M), ("1F1B", S - stage):
        slots, gradient = run_stage(S, stage, ahead)
        rows = [None] * 4
        dist.all_gather_object(rows, slots)
        end = max(map(len, rows))
        idle = (end - 2 * M) / end
        if rank == 0:
            waits = f"each waits in {end - 2 * M} of {end} slots, {idle:.1%} = (S-1)/(M+S-1)"
            print(f"{schedule}, {S} stages: {waits}; stage 0 keeps {ahead} inputs")
            for row in rows[:S]:
                print(*row, *[".."] * (end - len(row)))
        assert idle == (S - 1) / (M + S - 1)
        outputs = torch.linalg.multi_dot((*weights[:S].flip(0), inputs.T))  # as in one process
        (expected,) = torch.autograd.grad(outputs.square().sum() / 2, weights)
        torch.testing.assert_close(gradient, expected[stage])
dist.destroy_process_group()
