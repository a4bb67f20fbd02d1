"""Data parallelism does not change results, because the gradient of a mean is the mean of the gradients.
`nn.DataParallel` uses one process for all GPUs, and sends more than DDP, which uses one process per GPU.

    python by_hand/data_parallel.py

In this repository: `Strategy.read` in mingpt/parallel/strategy.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

N = 4  # GPUs
torch.set_default_dtype(torch.float64)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 16))
x, y = torch.randn(32, 64), torch.randn(32, 16)


def gradient(x, y):
    gradients = torch.autograd.grad(mse_loss(model(x), y), model.parameters())
    return nn.utils.parameters_to_vector(gradients)


whole = gradient(x, y)
mean = sum(map(gradient, x.chunk(N), y.chunk(N))) / N
# Therefore, update and learning rate are the same for any N as with the whole batch on one GPU.
torch.testing.assert_close(mean, whole, rtol=1e-12, atol=1e-15)

# nn.DataParallel uses all GPUs. Without a GPU, it only calls the model.
torch.testing.assert_close(nn.DataParallel(model)(x), model(x))

inputs, outputs, weights = 4 * x.numel(), 4 * y.numel(), 4 * whole.numel()  # bytes in fp32
others = (N - 1) / N
print(f"""\
bytes sent in a step      nn.DataParallel, by GPU 0         DDP, by each GPU
scatter the inputs        {inputs * others:<9,.0f}                         0         each reads its own
copy the weights          {weights * (N - 1):<9,}                         0         each has its own
forward                   0         threads share one GIL   0         processes share none
gather the outputs        {outputs * others:<9,.0f} to GPU 0                0
loss                      0         other GPUs wait         0
scatter their gradients   {outputs * others:<9,.0f}                         0
sum weights' gradients    {weights * (N - 1):<9,} to GPU 0                {weights * 2 * others:<9,.0f} during backward
update                    0         other GPUs wait         0         the same on all""")
