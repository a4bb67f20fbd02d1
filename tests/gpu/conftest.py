"""Fixtures of the tests with a pretended GPU."""

from pathlib import Path

import pytest

from tests.gpu.pretended_gpu import compile_library, unsupported_reason


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled pretended GPU."""
    if reason := unsupported_reason():
        pytest.skip(reason)
    return compile_library(tmp_path_factory.mktemp("pretended-gpu"))
