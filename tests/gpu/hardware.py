"""Prints the number of GPUs and the versions that a problem report needs, as JSON."""

import json
import os
import platform
from collections import Counter

import torch
import torch.distributed as dist
from torch.utils import collect_env


def describe(count: int) -> str:
    versions = f"PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if not torch.cuda.is_available():
        return f"{versions}; PyTorch sees no CUDA GPU (driver: {driver or 'none'})"
    names = Counter(torch.cuda.get_device_name(number) for number in range(count))
    gpus = ", ".join(f"{number} x {name}" for name, number in names.items())
    nccl = "none"
    if dist.is_nccl_available():
        nccl = ".".join(str(number) for number in torch.cuda.nccl.version())
    return f"{gpus}, driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}, {versions}"


if __name__ == "__main__":
    # On a machine without GPUs, TEST_GPU_COUNT=2 makes tests of GPUs run on the CPU with gloo.
    count = int(os.environ.get("TEST_GPU_COUNT", torch.cuda.device_count()))
    print(json.dumps({"count": count, "report": describe(count)}))
