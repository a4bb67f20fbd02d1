"""Fixtures for all tests."""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before PyTorch is imported: if it sees GPUs, ranks use nccl, and each of them needs a GPU.
os.environ.setdefault("TEST_VISIBLE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from tests.helpers import find_gpus, ip, write_text

# nohup ignores SIGHUP, and the processes that tests start would inherit this.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Prints one message if `pytest -m gpu` runs without a GPU, instead of skipping each test."""
    if config.option.markexpr != "gpu" or find_gpus()["count"]:
        return None
    print(f"no test has run: {find_gpus()['report']}")
    return 0


def pytest_report_header(config: pytest.Config) -> str | None:
    """Returns the hardware and versions for bug reports about GPUs."""
    if config.option.markexpr == "gpu" or shutil.which("nvidia-smi"):
        return find_gpus()["report"]
    return None


# Warnings are errors, except for one of torch.distributed.optim while it is imported. These filters are not in
# pyproject.toml, where they would also apply to plugins: pytest-benchmark before 5.3 warns when pytest starts.
def pytest_configure(config: pytest.Config) -> None:
    for line in ("error", "ignore:`torch.jit:DeprecationWarning"):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 3,000 characters with some structure."""
    return write_text(tmp_path / "text.txt")


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, connected by eth1 at 10.213.0.1 and 10.213.0.2; eth0 leads elsewhere."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("creates network namespaces: needs root and iproute2")
    names = [f"{end}-{uuid.uuid4().hex[:8]}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "peer0")
        ip("link", "add", "eth1", "netns", names[0], "type", "veth", "peer", "name", "eth1", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.77.{number}.1/24", "dev", "eth0")
            ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", "eth1")
            for device in ("lo", "eth0", "eth1"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small models are not faster with more threads, and far slower if other processes use the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restores signal handlers. A run in the test's process may leave signals ignored, also for child processes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
