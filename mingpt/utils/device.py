"""What does the machine choose? Device, precision and threads: rules on hardware flags, never on a stopwatch.

Resuming exactly needs the same choices, so they travel in the snapshot and are kept while the hardware allows.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
from pathlib import Path

import torch

from mingpt.utils.errors import UserError


def use_cuda(backend: str) -> bool:
    """Whether ranks train on CUDA GPUs: nccl always, gloo never, auto where there are any.

    Raises:
        UserError: nccl without a GPU.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise UserError("distributed.backend is nccl, but PyTorch sees no CUDA GPU here; set it to auto or gloo")
    return backend != "gloo" and torch.cuda.is_available()


def visible_gpu_uuids(backend: str) -> list[str]:
    """The identities of the GPUs that this process may use, whatever their numbers are here; none if it wants none."""
    if not use_cuda(backend):
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def choose_device(backend: str, local_rank: int, local_size: int, world_size: int) -> torch.device:
    """The device of this rank: a GPU of its own or the CPU; Apple's GPU only for one process alone.

    Raises:
        UserError: more processes on this machine than GPUs.
    """
    if not use_cuda(backend):
        apple = backend == "auto" and world_size == 1 and torch.backends.mps.is_available()
        return torch.device("mps" if apple else "cpu")
    processes, gpus = max(local_size, local_rank + 1), torch.cuda.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes on {platform.node()}, which has {gpus} GPU(s): start at most {gpus} of them "
            f"(--nproc_per_node={gpus}), or train on the CPU with --distributed.backend gloo"
        )
    return torch.device("cuda", local_rank)


def device_name(device: torch.device) -> str:
    """What the banner calls the device, such as `cuda:1 (NVIDIA H200)`."""
    return f"{device} ({device_kind(device)})"


def device_kind(device: torch.device) -> str:
    """The device's model, as far as it decides last bits, such as `NVIDIA H200` or `x86_64 AVX512`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def has_bf16(device: torch.device) -> tuple[bool, str]:
    """Whether the device multiplies bfloat16 in hardware, and the reason in words.

    On CPUs, PyTorch's own "supported" includes emulation, which is several times slower than fp32.
    """
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        return has, f"this GPU {'has' if has else 'has no'} bf16 hardware"
    if device.type == "cpu":
        has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return has, f"this CPU has {'' if has else 'neither '}AVX512-BF16 {'or' if has else 'nor'} AMX"
    return False, f"{device.type} trains in fp32"


def choose_precision(wanted: str, device: torch.device, kept: str | None) -> tuple[str, str]:
    """Precision of the matrix products, and why.

    Args:
        wanted: auto, fp32, bf16 or fp16
        device: where they run
        kept: what the snapshot that is resumed was made with

    Raises:
        UserError: fp16 elsewhere than on a CUDA GPU.
    """
    if wanted == "fp16" and device.type != "cuda":
        raise UserError(
            f"trainer.precision is fp16, which needs a CUDA GPU; on {device.type} set it to auto, fp32 or bf16"
        )
    hardware, words = has_bf16(device)
    if wanted != "auto":
        slow = f", and {words}: emulated, slow" if wanted == "bf16" and not hardware else ""
        return wanted, f"as asked{slow}"
    if kept == "fp32" or (kept == "bf16" and hardware) or (kept == "fp16" and device.type == "cuda"):
        return kept, "auto: kept from the snapshot"
    changed = f"; the snapshot was made in {kept}, so the last bits will differ" if kept else ""
    return ("bf16" if hardware else "fp32"), f"auto: {words}{changed}"


def check_compiler(device: torch.device) -> None:
    """Makes sure that there is what torch.compile makes kernels with.

    Raises:
        UserError: there is no C++ compiler (CPU) or no Triton (GPU).
    """
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise UserError("trainer.compile is true, but Triton is not here: pip install triton, or set it to false")
        return
    compiler = os.environ.get("CXX") or ("clang++" if platform.system() == "Darwin" else "g++")  # as torch.compile does
    if shutil.which(compiler) is None:
        raise UserError(
            f"trainer.compile is true, but there is no C++ compiler: found no {compiler}; install one, let CXX name "
            "it, or set trainer.compile to false"
        )


def memory_per_rank(device: torch.device, local_size: int) -> int:
    """Bytes of memory that a rank may fill: its GPU's, or its share of the machine's as far as this job may use it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    words = limit.read_text().strip() if limit.exists() else ""
    return min(machine, int(words) if words.isdecimal() else machine) // local_size


def set_deterministic(device: torch.device) -> None:
    """Makes a CUDA GPU choose kernels that add in the same order each time; on CPUs all that are used here do."""
    if device.type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS's condition, per PyTorch's notes on reproducibility
        torch.use_deterministic_algorithms(True)


def seed_device(device: torch.device, seed: int) -> None:
    """Seeds the device's own generator; torch.manual_seed does all devices', in 0.1 ms."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def tune_malloc() -> None:
    """Lets glibc keep what a step has freed for the next step, instead of asking Linux for it page by page each time.

    Steps of models from 192 wide on took 7% longer without (measured). Other C libraries go on as they do.
    """
    if platform.libc_ver()[0] == "glibc":
        c_library = ctypes.CDLL(None)
        c_library.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD, bytes; malloc.h has the numbers
        c_library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes


def choose_threads(wanted: int | str, local_size: int, kept: int | None) -> tuple[int, str]:
    """CPU threads of this rank, and why.

    Args:
        wanted: a number, or auto
        local_size: ranks on this machine
        kept: what the snapshot that is resumed was made with, if the number of ranks is the same
    """
    if isinstance(wanted, int):
        return wanted, "as asked"
    if kept is not None:
        return kept, "auto: kept from the snapshot"
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list has one number for each level of nesting
    if threads.isdecimal() and int(threads):
        return int(threads), "auto: OMP_NUM_THREADS"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_size), f"auto: {cores} cores / {local_size} ranks"
