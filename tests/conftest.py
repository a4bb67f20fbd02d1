"""Fixtures of all tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before PyTorch is imported: where it sees GPUs, ranks use nccl and need a GPU each.
os.environ.setdefault("TEST_VISIBLE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from helpers import write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 3,000 characters with some structure."""
    return write_text(tmp_path / "text.txt")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more threads, and lose much where other processes want the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restores signal handlers: a run that ends in the test's process may leave signals ignored, also for children."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
