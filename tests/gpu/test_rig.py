"""On GPUs the host waits for nothing between log lines: each mechanism on a pretended GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.pretended_gpu import pretended_gpu_env
from tests.gpu.rig import CASES
from tests.helpers import ROOT, run_program

# One of each strategy, precision, optimizer, checkpointing and schedule, and each group of mistakes.
FAST = [
    "fsdp-fp16-muon-selective",
    "zero1-fp16-muon-none",
    "ddp-bf16-adamw-full",
    "tree-fp32-muon",
    "gpipe-bf16-adamw-stage1",
    "fault-strided",
    "fault-item",
    "fault-race",
]
# The mechanisms that these leave out. `python -m tests.gpu.rig` runs all combinations.
SLOW = [
    "one-fp32-adamw",
    "zero2-bf16-muon-none",
    "offload-bf16-adamw",
    "1f1b-fp16-muon-stage0",
    "1f1b-fsdp-fp16-muon-stage1",
    *(name for name in CASES if name.startswith("fault-") and name not in FAST),
]
PROCESSES = [FAST, SLOW]


@pytest.fixture(scope="module")
def report(library: Path) -> Callable[[str], dict[str, Any]]:
    """The result of a case, from a process that runs several."""
    results: dict[str, dict[str, Any]] = {}

    def result_of(name: str) -> dict[str, Any]:
        if name not in results:
            [names] = (names for names in PROCESSES if name in names)
            done = run_program("-m", "tests.gpu.rig", "--json", *names, cwd=ROOT, **pretended_gpu_env(library))
            assert done.returncode == 0, done.stderr
            results.update(json.loads(done.stdout))
        return results[name]

    return result_of


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_host_does_not_wait_between_log_lines(name: str, report: Callable[[str], dict[str, Any]]) -> None:
    """And mistakes are found."""
    result = report(name)
    assert not result["found"], "\n".join(result["found"])
    assert not result["missing"]
