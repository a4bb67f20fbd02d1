"""In fp16, small gradients become 0. Loss scaling multiplies the loss before backward and divides the gradients after
it. bf16 has fewer digits but the same range as fp32, so it does not need scaling.

    python by_hand/mixed_precision.py

In this repository: `Strategy.forward_backward` in mingpt/parallel/strategy.py
"""

import torch


def gradient(dtype, scale):
    """Returns the gradient of the loss 2^-26 w, which backward stores in `dtype` on its way to w."""
    w = torch.tensor(1.0, requires_grad=True)
    output = w.to(dtype)
    loss = output.float() * 2**-26
    (loss * scale).backward()
    return w.grad / scale


print("numbers of the type                     gradient, with the loss multiplied by")
print("           largest  smallest   epsilon         1      2^10      2^44")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    unscaled, scaled, too_large = [gradient(dtype, scale) for scale in (1, 2**10, 2**44)]
    numbers = info.max, info.smallest_normal * info.eps, info.eps, unscaled, scaled, too_large
    print(f"{str(dtype)[6:]:8}", *(f"{number:9.1e}" for number in numbers))
    assert scaled == 2**-26
    # Where a gradient is infinite, GradScaler skips the step and halves its scale.
    assert (unscaled == 0) == too_large.isinf() == (dtype == torch.float16)
