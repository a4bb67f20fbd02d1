"""Chooses device and precision by rules on hardware flags, never by measured time.

Exact resume needs the same choices, so they are saved in the snapshot and kept if the hardware allows it.

The code branches on the type of the device, because `torch.accelerator` (PyTorch 2.13) does not provide device names,
UUIDs, seeds or flags of bf16 arithmetic, raises errors on a machine without an accelerator, and includes GPUs that
distributed.backend does not support.
"""

import ctypes
import os
import platform
import random

import numpy as np
import torch

from mingpt.errors import UserError

# Peak performance by the name of the GPU in PyTorch, in 1e12 FLOP/s, for 16-bit matrix products accumulated in fp32,
# and for fp32 without TF32. Both are without sparsity, which doubles the numbers in many data sheets. The sources are
# data sheets of NVIDIA and, for GeForce, appendix A of the white papers on GA102 and AD102.
PEAK_TFLOPS = {
    "Tesla V100-SXM2-16GB": (125.0, 15.7),
    "Tesla T4": (65.0, 8.1),
    "NVIDIA A100-SXM4-40GB": (312.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (312.0, 19.5),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA H100 80GB HBM3": (989.5, 67.0),
    "NVIDIA H200": (989.5, 67.0),
    "NVIDIA GeForce RTX 3090": (71.0, 35.6),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
}


def use_cuda(backend: str) -> bool:
    """Returns whether ranks train on CUDA GPUs, because there are some and the backend is not gloo."""
    return backend != "gloo" and torch.cuda.is_available()


def choose_device(backend: str, local_rank: int, world_size: int) -> torch.device:
    """Returns the device of this rank: a GPU, or the CPU. Only a single process uses Apple's GPU.

    Raises:
        UserError: the backend is nccl, and there is no GPU.
    """
    if not use_cuda(backend):
        if backend == "nccl":
            raise UserError("distributed.backend is nccl, but PyTorch sees no CUDA GPU here; set it to auto or gloo")
        use_mps = backend == "auto" and world_size == 1 and torch.backends.mps.is_available()
        return torch.device("mps" if use_mps else "cpu")
    # srun may be configured so that each process sees only its own GPU, as number 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def device_kind(device: torch.device) -> str:
    """Returns the properties of the device that results depend on, such as `NVIDIA H200` or `x86_64 AVX512`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def has_bf16(device: torch.device) -> tuple[bool, str]:
    """Returns whether the hardware multiplies bfloat16 faster than fp32, and the reason.

    On CPUs, PyTorch's notion of support includes emulation, which is several times slower than fp32. AVX512-BF16 has
    half the FLOP/s of fp32 on Intel CPUs (measured on Sapphire Rapids without AMX), and twice the FLOP/s on AMD CPUs.
    """
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        return has, f"this GPU has {'' if has else 'no '}bf16 hardware"
    if device.type == "cpu":
        # PyTorch 2.11 or newer; older versions train in fp32 on CPUs
        flags = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        if flags.get("amx_tile"):
            return True, "this CPU has AMX"
        if not flags.get("avx512_bf16"):
            return False, "this CPU has neither AVX512-BF16 nor AMX"
        if "intel" in str(flags.get("cpu_name", "")).lower():
            return False, "this CPU has AVX512-BF16, but no AMX, without which Intel's fp32 is faster"
        return True, "this CPU has AVX512-BF16"
    return False, f"{device.type} trains in fp32"


def choose_precision(
    requested: str, device: torch.device, saved: str | None, fp16_obstacle: str | None = None
) -> tuple[str, str]:
    """Chooses the precision of matrix products; returns the precision and the reason.

    Args:
        requested: trainer.precision
        saved: precision of the snapshot that training resumes from
        fp16_obstacle: the key that excludes fp16
    """
    hardware, reason = has_bf16(device)
    if requested != "auto":
        slow = f", but slow, because {reason}" if requested == "bf16" and not hardware else ""
        return requested, f"as configured{slow}"
    has_fp16 = device.type == "cuda" and fp16_obstacle is None
    if saved == "fp32" or (saved == "bf16" and hardware) or (saved == "fp16" and has_fp16):
        return saved, "auto: kept from the snapshot"
    changed = f"; the snapshot was made in {saved}, so the last bits will differ" if saved else ""
    if hardware:
        return "bf16", f"auto: {reason}{changed}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):  # it has tensor cores
        if has_fp16:
            return "fp16", f"auto: {reason}, but for fp16{changed}"
        reason = f"{reason}, and {fp16_obstacle} excludes fp16"
    return "fp32", f"auto: {reason}{changed}"


def gpu_metrics(device: torch.device, precision: str, flops_per_second: float) -> dict[str, float]:
    """Returns metrics of this rank's GPU for a train row, without waiting for the GPU. It is empty for other devices.

    Args:
        flops_per_second: operations of the model per second on this GPU

    Returns:
        memory: peak of the memory allocated by PyTorch since the start, in GiB
        mfu: model FLOPs utilization, from 0 to 1; left out unless the GPU's peak is listed in PEAK_TFLOPS
    """
    if device.type != "cuda":
        return {}
    metrics = {"memory": torch.cuda.max_memory_allocated(device) / 2**30}
    peaks = PEAK_TFLOPS.get(device_kind(device))
    if peaks is not None:
        metrics["mfu"] = flops_per_second / (1e12 * peaks[precision == "fp32"])
    return metrics


def set_deterministic(device: torch.device) -> None:
    """Selects deterministic kernels on a CUDA GPU. On CPUs, all kernels of training are deterministic."""
    if device.type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required by cuBLAS, see PyTorch's notes on reproducibility
        # NVLS sums in varying order (https://github.com/pytorch/pytorch/issues/154880). PyTorch excludes NVLS only if
        # deterministic algorithms are on before the process group is initialized, which is too early here. NCCL reads
        # the variable later, when the first collective on a GPU creates the communicator.
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
        torch.use_deterministic_algorithms(True)
        # No code reads uninitialized memory, so filling each new tensor would only cost time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the generators of Python, NumPy, the CPU and this device; the seed has 64 bits.

    `torch.manual_seed` seeds the generators of all devices, which takes 0.07 ms.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def tune_malloc() -> None:
    """Makes glibc keep freed memory for the next step instead of returning it to Linux.

    Otherwise, page faults make steps of models at least 192 wide 7% slower (measured).
    """
    if platform.libc_ver()[0] == "glibc":
        c_library = ctypes.CDLL(None)
        c_library.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD, bytes; malloc.h has the numbers
        c_library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes
