"""Muon for the blocks' matrices and AdamW for all other parameters, in one optimizer."""

import math
from collections import defaultdict
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTUM = 0.95  # with Nesterov momentum
# a, b, c of each iteration, x <- a x + b (x x^T) x + c (x x^T)^2 x, and the safety factor of 2%, from Polar Express.
COEFFICIENTS = ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061))
SAFETY = 1.02  # before the first iteration, no singular value may exceed 1


class AdamW(torch.optim.AdamW):
    """AdamW without decorators that import torch._dynamo, which takes a second and is only needed to compile AdamW."""

    add_param_group = unwrap(Optimizer.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class MuonWithAdamW(Optimizer):
    """Muon (Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024) for some groups, AdamW for others.

    Muon's updates are scaled to the RMS of AdamW's updates (Liu et al., "Muon is Scalable for LLM Training", 2025), so
    both use the same learning rate, like torch.optim.Muon with `match_rms_adamw`. Unlike torch.optim.Muon, this class
    multiplies matrices of equal shape in one batch and in any dtype, handles sharded matrices, and supports
    `found_inf`.

    Args:
        groups: parameter groups; groups with a true `muon` use Muon
        settings: AdamW's settings, and the dtype of Muon's matrix products, `ns_dtype`
    """

    add_param_group = AdamW.add_param_group

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, settings)
        # Both optimizers share the dictionaries of the groups, so AdamW sees a learning rate that is set here.
        self.adamw = AdamW([g for g in self.param_groups if not g["muon"]])
        self.adamw.state = self.state
        self._step_supports_amp_scaling = True  # GradScaler sets `found_inf` instead of reading it

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters, or none if `found_inf` is 1. Like fused AdamW, it does not synchronize the device.

        GradScaler must have unscaled the gradients.
        """
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            same_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    same_shape[parameter.shape].append(parameter)
            for matrices in same_shape.values():
                self._update(matrices, group, found_inf)
        self.adamw.found_inf = found_inf  # type: ignore[attr-defined]
        self.adamw.step()

    def _update(self, matrices: list[nn.Parameter], group: dict[str, Any], found_inf: Tensor | None) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffers = [to_local(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = [to_local(matrix.grad) for matrix in matrices]  # type: ignore[arg-type]
        scale: float | Tensor = 1.0
        if found_inf is not None:
            scale = 1 - found_inf
            gradients = [
                torch.where(found_inf > 0, buffer, gradient)
                for buffer, gradient in zip(buffers, gradients, strict=True)
            ]
        torch._foreach_lerp_(buffers, gradients, 1 - MOMENTUM)
        nesterov = torch.stack(gradients)
        torch._foreach_lerp_([*nesterov], buffers, MOMENTUM)
        like = matrices[0]
        if hasattr(like, "to_local"):
            updates = newton_schulz_sharded(nesterov, group["ns_dtype"], like)
        else:
            updates = newton_schulz(nesterov, group["ns_dtype"])
        weights = [to_local(matrix.detach()) for matrix in matrices]
        rate = group["lr"] * scale
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        updates.mul_(rate * 0.2 * math.sqrt(max(like.shape)))
        torch._foreach_sub_(weights, [*updates])


def newton_schulz(gradients: Tensor, ns_dtype: torch.dtype) -> Tensor:
    """Orthogonalizes k matrices, and gives all neurons updates of equal norm; (k, m, n) -> (k, m, n) in fp32.

    Three iterations of Polar Express (Amsel et al., 2025) bring all singular values that are at least 0.002 of the
    matrix's norm between 0.15 and 1.9. Then the rows of tall and square matrices and the columns of wide matrices are
    normalized, like in NorMuon (Li et al., 2025) but without a running average, so that the Frobenius norm equals the
    norm of an orthogonal matrix.
    """
    _, m, n = gradients.shape
    is_tall = m >= n  # so x^T x is not larger than x x^T
    norm = gradients.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    updates = (gradients / (SAFETY * norm)).to(ns_dtype)
    for a, b, c in COEFFICIENTS:
        square = torch.bmm(updates.mT, updates) if is_tall else torch.bmm(updates, updates.mT)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        if is_tall:
            updates = torch.baddbmm(updates, updates, polynomial, beta=a)
        else:
            updates = torch.baddbmm(updates, polynomial, updates, beta=a)
    updates = updates.float()
    norms = updates.square().sum(2 if is_tall else 1, keepdim=True).sqrt_()
    return updates.mul_(math.sqrt(min(m, n) / max(m, n)) / norms.clamp_(min=1e-12))


def newton_schulz_sharded(rows: Tensor, ns_dtype: torch.dtype, like: Any) -> Tensor:
    """Applies `newton_schulz` to k matrices (m, n) that are sharded by rows. Each rank receives some of them in full.

    Args:
        rows: this rank's rows of the matrices
        like: one of the k parameters, a DTensor
    """
    from torch.distributed.tensor import DTensor, Shard  # a slow import

    shape = torch.Size((len(rows), *like.shape))
    stride = (like.numel(), like.size(1), 1)
    sharded = partial(DTensor.from_local, device_mesh=like.device_mesh, shape=shape, stride=stride)
    full = sharded(rows, placements=[Shard(1)]).redistribute(placements=[Shard(0)]).to_local()
    updates = sharded(newton_schulz(full, ns_dtype), placements=[Shard(0)])
    return updates.redistribute(placements=[Shard(1)]).to_local()


def to_local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, and any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # importing DTensor for isinstance is slow
