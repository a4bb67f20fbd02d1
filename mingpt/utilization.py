"""How far a GPU is used: its memory, and the operations of a step beside those that it can do (MFU)."""

from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mingpt.config import GPTConfig
from mingpt.hardware.device import device_kind
from model import GPT

# 1e12 FLOP/s at the peak, by the name in PyTorch: in matrix products of bf16 and fp16 with sums in fp32, without
# sparsity, for which data sheets often give twice as much; in fp32 without TF32. From the data sheets of NVIDIA, at
# nvidia.com/en-us/data-center; for GeForce, from appendix A of the white papers of GA102 and AD102.
V100 = {"fp16": 125.0, "fp32": 15.7}
A100 = {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "Tesla V100-SXM2-16GB": V100,
    "Tesla V100-SXM2-32GB": V100,
    "Tesla T4": {"fp16": 65.0, "fp32": 8.1},
    "NVIDIA A10": {"bf16": 125.0, "fp16": 125.0, "fp32": 31.2},
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA L4": {"bf16": 121.0, "fp16": 121.0, "fp32": 30.3},
    "NVIDIA L40S": {"bf16": 362.05, "fp16": 362.05, "fp32": 91.6},
    "NVIDIA H100 80GB HBM3": {"bf16": 989.5, "fp16": 989.5, "fp32": 67.0},
    "NVIDIA H100 PCIe": {"bf16": 756.5, "fp16": 756.5, "fp32": 51.0},
    "NVIDIA H100 NVL": {"bf16": 835.5, "fp16": 835.5, "fp32": 60.0},
    "NVIDIA H200": {"bf16": 989.5, "fp16": 989.5, "fp32": 67.0},
    "NVIDIA B200": {"bf16": 2250.0, "fp16": 2250.0, "fp32": 75.0},
    "NVIDIA GeForce RTX 3090": {"bf16": 71.0, "fp16": 71.0, "fp32": 35.6},
    "NVIDIA GeForce RTX 4090": {"bf16": 165.2, "fp16": 165.2, "fp32": 82.6},
}


def gpu_metrics(device: torch.device, precision: str, config: GPTConfig, tokens_per_second: float) -> dict[str, float]:
    """What train rows say of this rank's GPU; nothing on another device. It does not wait for the GPU.

    Args:
        tokens_per_second: of one GPU

    Returns:
        memory: most that PyTorch has allocated since the start, in GiB
        mfu: model FLOPs utilization, from 0 to 1; left out if the peak of the GPU is not known
    """
    if device.type != "cuda":
        return {}
    metrics = {"memory": torch.cuda.max_memory_allocated(device) / 2**30}
    peak = PEAK_TFLOPS.get(device_kind(device), {}).get(precision)
    if peak is not None:
        metrics["mfu"] = tokens_per_second * flops_per_sequence(config) / config.block_size / (1e12 * peak)
    return metrics


@cache
def flops_per_sequence(config: GPTConfig) -> int:
    """Floating-point operations of forward and backward for block_size tokens.

    They equal the usual formula: 6 per token and weight in a matrix product, and 12 n_layer n_embd T per token for
    attention, whose masked half is counted too (Chowdhery et al., "PaLM", 2022, appendix B).
    """
    with torch.device("meta"):
        model = GPT(config)
        idx = torch.zeros(1, config.block_size, dtype=torch.long)
    # Fused attention kernels would count the scores that backward recomputes, too.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, loss = model(idx, idx)
        torch.autograd.grad(loss, list(model.parameters()))
    return counter.get_total_flops()
