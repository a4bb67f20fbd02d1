"""Utilization of a GPU: memory, and model FLOPs utilization (MFU)."""

from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mingpt.config.schema import GPTConfig
from mingpt.system.device import device_kind
from model import GPT

# Peak performance by the name of the GPU in PyTorch, in 1e12 FLOP/s: of 16-bit matrix products accumulated in fp32, and
# of fp32 without TF32. Both are without sparsity, which doubles the numbers in many data sheets. The sources are data
# sheets of NVIDIA and, for GeForce, appendix A of the white papers on GA102 and AD102.
PEAK_TFLOPS = {
    "Tesla V100-SXM2-16GB": (125.0, 15.7),
    "Tesla V100-SXM2-32GB": (125.0, 15.7),
    "Tesla T4": (65.0, 8.1),
    "NVIDIA A10": (125.0, 31.2),
    "NVIDIA A100-SXM4-40GB": (312.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (312.0, 19.5),
    "NVIDIA A100-PCIE-40GB": (312.0, 19.5),
    "NVIDIA A100 80GB PCIe": (312.0, 19.5),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA L40S": (362.05, 91.6),
    "NVIDIA H100 80GB HBM3": (989.5, 67.0),
    "NVIDIA H100 PCIe": (756.5, 51.0),
    "NVIDIA H100 NVL": (835.5, 60.0),
    "NVIDIA H200": (989.5, 67.0),
    "NVIDIA B200": (2250.0, 75.0),
    "NVIDIA GeForce RTX 3090": (71.0, 35.6),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
}


def gpu_metrics(device: torch.device, precision: str, config: GPTConfig, tokens_per_second: float) -> dict[str, float]:
    """Returns metrics of this rank's GPU for a train row, without waiting for the GPU. It is empty for other devices.

    Args:
        tokens_per_second: speed of one GPU

    Returns:
        memory: peak of the memory allocated by PyTorch since the start, in GiB
        mfu: model FLOPs utilization, from 0 to 1; left out unless the GPU's peak is listed in PEAK_TFLOPS
    """
    if device.type != "cuda":
        return {}
    metrics = {"memory": torch.cuda.max_memory_allocated(device) / 2**30}
    peaks = PEAK_TFLOPS.get(device_kind(device))
    if peaks is not None:
        peak = 1e12 * peaks[precision == "fp32"]
        metrics["mfu"] = tokens_per_second * flops_per_sequence(config) / config.block_size / peak
    return metrics


@cache
def flops_per_sequence(config: GPTConfig) -> int:
    """Returns the number of floating-point operations of forward and backward for block_size tokens.

    It equals the usual formula: 6 per token and weight in a matrix product, and 12 n_layer n_embd T per token for
    attention, including the masked half (Chowdhery et al., "PaLM", 2022, appendix B).
    """
    with torch.device("meta"):
        model = GPT(config)
        idx = torch.zeros(1, config.block_size, dtype=torch.long)
    # With fused attention kernels, the scores that backward recomputes would be counted twice.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, loss = model(idx, idx)
        torch.autograd.grad(loss, list(model.parameters()))
    return counter.get_total_flops()
