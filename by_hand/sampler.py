"""DistributedSampler splits one epoch, and needs `set_epoch` to shuffle the next epoch differently. If the order is a
function of the sample number, it does not depend on any state or on the number of ranks.

    python by_hand/sampler.py

In this repository: `CharDataset.starts` in char_dataset.py
"""

import torch
from torch.utils.data import DistributedSampler

samplers = [DistributedSampler(range(10), num_replicas=4, rank=rank) for rank in range(4)]


def draw(title):
    print(f"{title:22}", *[list(sampler) for sampler in samplers])


print("DistributedSampler     rank 0    rank 1    rank 2    rank 3")
draw("epoch 0")
draw("epoch 1, no set_epoch")
for sampler in samplers:
    sampler.set_epoch(1)
draw("epoch 1, set_epoch(1)")


def sample(number):
    """Returns a sample by its number, counted over all epochs. The epoch's number is the seed of its order."""
    epoch, position = divmod(number, 10)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(epoch))
    return order[position].item()


print("\nnumbers 8 to 15, of two epochs")
batch = [sample(number) for number in range(8, 16)]
for ranks in (1, 2):
    print(f"world size {ranks}:", *[batch[rank::ranks] for rank in range(ranks)])
assert {sample(number) for number in range(10, 20)} == set(range(10))
