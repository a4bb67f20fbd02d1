"""A whole training program with DDP, to copy for your own model. Each start continues from the last saved epoch.

    torchrun --standalone --nproc_per_node=2 by_hand/train.py 3

In this repository: `Trainer` in trainer.py
"""

import os
import sys

import torch
import torch.distributed as dist

# An optimizer imports this. If the group already exists, default arguments in it would keep the group until Python has
# ended, and then gloo's threads can abort the process (pytorch#190489).
import torch.distributed.nn
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
SNAPSHOT = "runs/tour/train.pt"
BATCH_SIZE = 20  # samples per rank
LEARNING_RATE = 0.02  # for one rank


def main():
    backend = "gloo"
    device = "cpu"
    if torch.cuda.is_available():
        backend = "nccl"
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # without this, "cuda" would be GPU 0 on all ranks
    dist.init_process_group(backend)
    n = dist.get_world_size()

    torch.manual_seed(0)  # all ranks make the same data
    points = torch.randn(1000, 2)
    dataset = TensorDataset(points, points.norm(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(model)
    # With n ranks, a batch is n times as large, and an epoch has 1/n of the steps. So each step is n times as large.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * n, momentum=0.9)

    first_epoch = 0
    # All ranks load the file that rank 0 has saved, so several machines need a shared folder.
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT, map_location=device)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * n  # the number of ranks may have changed
        first_epoch = snapshot["epoch"]

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)  # without this, all epochs would have the same order
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            snapshot = {
                "epoch": epoch + 1,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            os.makedirs(os.path.dirname(SNAPSHOT), exist_ok=True)
            torch.save(snapshot, SNAPSHOT + ".partial")
            os.replace(SNAPSHOT + ".partial", SNAPSHOT)  # so that a file with this name is always complete
            print(f"epoch {epoch}: {len(loader)} steps of {n * BATCH_SIZE} samples, loss {loss:.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main, where the model still uses the group
