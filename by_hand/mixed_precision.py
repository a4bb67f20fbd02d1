"""In fp16, small gradients become 0. Loss scaling multiplies the loss before backward and divides the gradients after
it. bf16 has fewer digits but the same range as fp32, so it does not need scaling.

    python by_hand/mixed_precision.py

In this repository: `Strategy.forward_backward` in mingpt/parallel/strategy.py
"""

import torch

POWERS = 0, 10, 44  # the loss is multiplied by 2 to each of these powers


def gradient(dtype, scale):
    """Returns the gradient of the loss 2^-26 w, which backward stores in `dtype` on its way to w."""
    w = torch.tensor(1.0, requires_grad=True)
    output = w.to(dtype)
    loss = output.float() * 2**-26
    (loss * scale).backward()
    return (w.grad / scale).item()


print("numbers of the type                     gradient, with the loss multiplied by")
print("           largest  smallest   epsilon", *(f"{f'2^{power}':>9}" for power in POWERS))
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    gradients = [gradient(dtype, 2**power) for power in POWERS]
    numbers = info.max, info.smallest_normal * info.eps, info.eps, *gradients
    print(f"{str(dtype)[6:]:8}", *(f"{number:9.1e}" for number in numbers))
    # In fp16, a gradient may be 0 or infinite; if it is infinite, GradScaler skips the step and halves its scale.
    assert dtype == torch.float16 or {*gradients} == {2**-26}
