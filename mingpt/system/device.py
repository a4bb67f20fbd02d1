"""The choice of device and precision: rules on hardware flags, never on measured time.

Exact resume needs the same choices, so they are saved in the snapshot and kept while the hardware allows.

Branches on the type of device remain: `torch.accelerator` (PyTorch 2.13) has no device names, UUIDs, seeds or flags of
bf16 arithmetic, raises errors on a machine without one, and includes GPUs for which distributed.backend has no value.
"""

import ctypes
import importlib.util
import os
import platform
import shutil

import torch

from mingpt.errors import UserError
from mingpt.system.cgroup import memory_limit
from mingpt.system.torch_versions import cpu_capabilities

NCCL_BYTES = 2**30  # for a communicator's buffers; 688 MB on four A100 (https://github.com/NVIDIA/nccl/issues/964)


def use_cuda(backend: str) -> bool:
    """Whether ranks train on CUDA GPUs: with nccl always, with gloo never, with auto if there are any.

    Raises:
        UserError: nccl without a GPU.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise UserError("distributed.backend is nccl, but PyTorch sees no CUDA GPU here; set it to auto or gloo")
    return backend != "gloo" and torch.cuda.is_available()


def visible_gpu_uuids(backend: str) -> list[str]:
    """UUIDs of the GPUs that this process may use; none if it trains on the CPU."""
    if not use_cuda(backend):
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def choose_device(backend: str, local_rank: int, local_world_size: int, world_size: int) -> torch.device:
    """This rank's device: a GPU of its own or the CPU; Apple's GPU only for a single process.

    Raises:
        UserError: more processes on this host than GPUs.
    """
    if not use_cuda(backend):
        use_mps = backend == "auto" and world_size == 1 and torch.backends.mps.is_available()
        return torch.device("mps" if use_mps else "cpu")
    processes = max(local_world_size, local_rank + 1)
    gpus = torch.cuda.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes on {platform.node()}, which has {gpus} GPU(s): start at most {gpus} of them "
            f"(--nproc_per_node={gpus}), or train on the CPU with --distributed.backend gloo"
        )
    return torch.device("cuda", local_rank)


def device_name(device: torch.device) -> str:
    """The device with its model, such as `cuda:1 (NVIDIA H200)`."""
    return f"{device} ({device_kind(device)})"


def device_kind(device: torch.device) -> str:
    """The device's model, as far as results depend on it, such as `NVIDIA H200` or `x86_64 AVX512`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def has_bf16(device: torch.device) -> tuple[bool, str]:
    """Whether the device multiplies bfloat16 in hardware that is faster than fp32's, and the reason.

    What PyTorch calls supported on a CPU includes emulation, which is several times slower than fp32. Intel's
    AVX512-BF16 reaches half of fp32's FLOP/s (measured on Sapphire Rapids without AMX), AMD's twice.
    """
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        return has, f"this GPU has {'' if has else 'no '}bf16 hardware"
    if device.type == "cpu":
        flags = cpu_capabilities()
        if flags.get("amx_tile", False):
            return True, "this CPU has AMX"
        if not flags.get("avx512_bf16", False):
            return False, "this CPU has neither AVX512-BF16 nor AMX"
        if "intel" in str(flags.get("cpu_name", "")).lower():
            return False, "this CPU has AVX512-BF16, but no AMX, without which Intel's fp32 is faster"
        return True, "this CPU has AVX512-BF16"
    return False, f"{device.type} trains in fp32"


def choose_precision(requested: str, device: torch.device, saved: str | None) -> tuple[str, str]:
    """Chooses the precision of matrix products; returns it and the reason.

    `saved` is the precision of the snapshot that training resumes from.
    """
    hardware, reason = has_bf16(device)
    if requested != "auto":
        slow = f", and {reason}: slow" if requested == "bf16" and not hardware else ""
        return requested, f"as asked{slow}"
    if saved == "fp32" or (saved == "bf16" and hardware) or (saved == "fp16" and device.type == "cuda"):
        return saved, "auto: kept from the snapshot"
    changed = f"; the snapshot was made in {saved}, so the last bits will differ" if saved else ""
    return ("bf16" if hardware else "fp32"), f"auto: {reason}{changed}"


def check_compiler(device: torch.device) -> None:
    """Raises a UserError if torch.compile does not find what it needs: Triton and a C compiler on a GPU, else C++."""
    language = "C++"
    variable = "CXX"
    names = ["clang++" if platform.system() == "Darwin" else "g++"]
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise UserError("trainer.compile is true, but Triton is not here: pip install triton, or set it to false")
        # Triton compiles the launchers of its kernels (runtime/build.py).
        language = "C"
        variable = "CC"
        names = ["gcc", "clang"]
    compilers = [os.environ[variable]] if os.environ.get(variable) else names
    if not any(map(shutil.which, compilers)):
        raise UserError(
            f"trainer.compile is true, but there is no {language} compiler: found no {' or '.join(compilers)}; install "
            f"one, let {variable} name it, or set trainer.compile to false"
        )


def memory_per_rank(device: torch.device, local_world_size: int, world_size: int) -> int:
    """Bytes that a rank may use: what is free on its GPU, or its share of the host's memory or of the cgroup's limit.

    On a GPU, neither the CUDA context nor NCCL's buffers count as free; PyTorch's allocator knows of neither.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)  # which creates the context
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, free + cached - NCCL_BYTES * (world_size > 1))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, memory_limit() or memory) // local_world_size


def set_deterministic(device: torch.device) -> None:
    """Selects deterministic kernels on a CUDA GPU; on CPUs, all kernels that training uses are."""
    if device.type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS's condition, per PyTorch's notes on reproducibility
        # NVLS sums in varying order (https://github.com/pytorch/pytorch/issues/154880). PyTorch excludes it only if
        # deterministic algorithms are on when the process group is made, which is before this. NCCL reads the variable
        # when it creates a communicator, which is at the first collective on a GPU, after this.
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
        torch.use_deterministic_algorithms(True)
        # Nothing reads uninitialized memory, so filling each new tensor would only cost time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_device(device: torch.device, seed: int) -> None:
    """Seeds this device's generator; torch.manual_seed seeds those of all devices, which takes 0.1 ms."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def tune_malloc() -> None:
    """Makes glibc keep freed memory for the next step instead of returning it to Linux.

    Page faults otherwise make steps of models at least 192 wide 7% slower (measured).
    """
    if platform.libc_ver()[0] == "glibc":
        c_library = ctypes.CDLL(None)
        c_library.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD, bytes; malloc.h has the numbers
        c_library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes
