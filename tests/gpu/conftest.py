"""Fixtures of the tests with a pretended GPU."""

import platform
from pathlib import Path

import pytest
import torch

from tests.gpu.pretended_gpu import compile_library, compiler


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled pretended GPU."""
    if torch.version.cuda or torch.version.hip or platform.system() != "Linux":
        pytest.skip("a GPU is pretended in a CPU build of PyTorch, on Linux")
    if compiler() is None:
        pytest.skip("there is no g++ to compile the pretended GPU")
    return compile_library(tmp_path_factory.mktemp("pretended-gpu"))
