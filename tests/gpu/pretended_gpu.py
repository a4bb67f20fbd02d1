"""A pretended GPU: `torch.cuda` and tensors on "cuda" in a CPU build of PyTorch, without memory and kernels.

pretended_gpu.cpp registers the device with PyTorch's dispatcher, and `_patch` replaces what `torch.cuda` takes from a
CUDA build. Programs choose their device and their backend as on a machine with 8 GPUs, or with those that
CUDA_VISIBLE_DEVICES lists. Operations on the device need FakeTensorMode, as in tests/gpu/dry_run.py.

`pretended_gpu_env` is the environment of a process with the pretended GPU: its interpreter imports
tests/gpu/sitecustomize/sitecustomize.py, which calls `install`.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
LIBRARY = "PRETENDED_GPU_LIBRARY"  # environment variable: path of the compiled library
NAME = "NVIDIA H100 80GB HBM3"

on_synchronize: list[Callable[[str], None]] = []  # called with the name of a function that waits for the device


def unsupported_reason() -> str:
    """Why no GPU can be pretended here; empty if one can."""
    libraries = [_torch_folder() / "lib" / name for name in ("libtorch_cuda.so", "libtorch_hip.so")]
    if platform.system() != "Linux" or any(library.exists() for library in libraries):
        return "a GPU is pretended in a CPU build of PyTorch, on Linux"
    return "" if shutil.which("g++") else "there is no g++ to compile the pretended GPU"


def compile_library(folder: Path) -> Path:
    """Compiles pretended_gpu.cpp into the folder, in some seconds; returns the library's path."""
    library, torch = folder / "libpretended_gpu.so", _torch_folder()
    include = [f"-I{torch / path}" for path in ("include", "include/torch/csrc/api/include")]
    link = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(["g++", *options, str(FOLDER / "pretended_gpu.cpp"), *include, *link], check=True)
    return library


def pretended_gpu_env(library: Path, visible: str | None = None) -> dict[str, str | None]:
    """Variables of a process with the pretended GPU. `visible` is CUDA_VISIBLE_DEVICES; with None, it sees 8 GPUs."""
    root = FOLDER.parent.parent
    path = os.pathsep.join(map(str, [FOLDER / "sitecustomize", root]))
    return {"PYTHONPATH": path, LIBRARY: str(library), "CUDA_VISIBLE_DEVICES": visible, "TEST_VISIBLE_GPUS": None}


def install() -> None:
    """Loads the library, and patches `torch.cuda` as soon as PyTorch is imported. To be called before that."""
    sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(MetaPathFinder):
    """Loads the library before PyTorch is imported, and patches `torch.cuda` after."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        ctypes.CDLL(os.environ[LIBRARY], ctypes.RTLD_GLOBAL)
        spec: Any = PathFinder.find_spec("torch")
        exec_module = spec.loader.exec_module

        def exec_and_patch(module: Any) -> None:
            exec_module(module)
            _patch()

        spec.loader.exec_module = exec_and_patch
        return spec


def _torch_folder() -> Path:
    spec: Any = PathFinder.find_spec("torch")
    return Path(spec.submodule_search_locations[0])


def visible_gpus() -> int:
    """The number of pretended GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return 8 if visible is None else len(list(filter(None, visible.split(","))))


def _patch() -> None:
    import torch

    current = [0]

    def synchronizes(name: str) -> Callable[..., None]:
        def synchronize(*args: Any) -> None:
            for callback in on_synchronize:
                callback(name)

        return synchronize

    def ignore() -> Callable[..., None]:  # a function of its own for each name, as torch.compile's rules require
        return lambda *args, **kwargs: None

    def set_device(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    def get_device_properties(device: Any = 0) -> SimpleNamespace:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        memory = {"total_memory": 80 * 2**30, "multi_processor_count": 132, "gcnArchName": ""}
        return SimpleNamespace(name=NAME, uuid=f"GPU-{index}", major=9, minor=0, **memory)

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        record = wait = ignore()
        synchronize = synchronizes("torch.cuda.Event.synchronize")

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: "Event") -> float:
            return 1.0

    class Stream:
        device, device_index, device_type, stream_id = torch.device("cuda", 0), 0, 1, 0

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        wait_stream = wait_event = __exit__ = ignore()
        synchronize = synchronizes("torch.cuda.Stream.synchronize")

        def query(self) -> bool:
            return True

        def record_event(self, event: Event | None = None) -> Event:
            return event or Event()

        def __enter__(self) -> "Stream":
            return self

    replacements = {
        "Event": Event,
        "Stream": Stream,
        "_lazy_init": ignore(),
        "current_device": lambda: current[0],
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "device": lambda device: contextlib.nullcontext(),
        "device_count": visible_gpus,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": get_device_properties,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: visible_gpus() > 0,
        "is_bf16_supported": lambda including_emulation=True: visible_gpus() > 0,
        "is_initialized": lambda: visible_gpus() > 0,
        "manual_seed": ignore(),
        "manual_seed_all": ignore(),
        "max_memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (79 * 2**30, 80 * 2**30),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "set_device": set_device,
        "set_rng_state": ignore(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": synchronizes("torch.cuda.synchronize"),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.accelerator.synchronize = synchronizes("torch.accelerator.synchronize")
    torch.Tensor.record_stream = ignore()
