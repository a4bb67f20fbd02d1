#!/usr/bin/env bash
# After steps of ZeroRedundancyOptimizer, its attribute `state` is empty, and a learning rate that is set in its
# `param_groups` is not the learning rate of the optimizer inside until the next step.
#
# Version: PyTorch 2.13.0. The class is an Optimizer, so both attributes exist, but the state of this rank's parameters
# is in `optim.state`, and step() copies the values of groups (_sync_param_groups in
# torch/distributed/optim/zero_redundancy_optimizer.py).
#
# Code that works with any optimizer by Optimizer.state (norms of moments, resets of momentum, hand-written checkpoints)
# does nothing with this one, without an error. A checkpoint written that way resumes with new moments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/trial.py" <<'END'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.optim import ZeroRedundancyOptimizer


def train(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = torch.nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    inner = optimizer.optim
    print(f"rank {rank}: state has {len(optimizer.state)} parameters, optim.state {len(inner.state)}")
    print(f"rank {rank}: lr {optimizer.param_groups[0]['lr']}, inside {inner.param_groups[0]['lr']}")
    assert len(optimizer.state) == 0 and len(inner.state) == 1 and inner.param_groups[0]["lr"] == 0.1
    optimizer.step()
    assert inner.param_groups[0]["lr"] == 0.5
    dist.destroy_process_group()


if __name__ == "__main__":
    print("PyTorch", torch.__version__)
    mp.spawn(train, sys.argv[1:], nprocs=2)
END
"$folder/venv/bin/python" "$folder/trial.py" "$folder/rendezvous"
