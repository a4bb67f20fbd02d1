"""The bench runs and prints its ratios; what they are is the machine's affair."""

from __future__ import annotations

import re

import pytest
from conftest import program

TINY = ("--model.n_embd", "16", "--model.n_layer", "1", "--data.block_size", "16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reduction", r"1 ranks: a step with tree takes \d\.\d+ of one with fast"),
        ("strategies", r"1 ranks: a step with fsdp takes \d\.\d+ of one with ddp"),
        (
            "snapshots",
            r"holds the step for \d+\.\d+ plain copies of its state, [\d,]+ bytes(.|\n)*save_every 100 costs",
        ),
    ],
)
def test_a_measurement_prints_its_ratios(name: str, said: str) -> None:
    done = program("bench.py", name, *TINY)
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout), done.stdout


def test_an_unknown_measurement_is_refused() -> None:
    done = program("bench.py", "everything")
    assert done.returncode == 1
    assert done.stderr.startswith("usage: bench.py {reduction,strategies,snapshots}")
