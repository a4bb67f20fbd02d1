"""Memory per rank, as a step measures it."""

import re
from pathlib import Path

import pytest

from tests.helpers import DEVICES, ranks_on, read_rows, run_args, run_on

KINDS = r"parameters ([\d.]+) MiB, gradients ([\d.]+) MiB, optimizer state ([\d.]+) MiB"


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_measures_what_the_documentation_says(device: str, text: Path, tmp_path: Path) -> None:
    ranks = ranks_on(device, 2)
    runs = {"ddp": "muon", "zero1": "adamw", "zero2": "adamw", "fsdp": "muon"}
    size = {"model__n_embd": 192, "trainer__max_steps": 1}
    argvs = [
        run_args(tmp_path / strategy, text, distributed__strategy=strategy, optimizer__name=optimizer, **size)
        for strategy, optimizer in runs.items()
    ]
    for (strategy, optimizer), out in zip(runs.items(), run_on(device, ranks, argvs, tmp_path), strict=True):
        counts = {name: 4 / 2**20 * int(n.replace(",", "")) for name, n in re.findall(r"(\S+) +([\d,]+)\n", out)}
        total = counts["total"]  # MiB in fp32
        state = 2 * total
        if optimizer == "muon":
            state -= sum(n for name, n in counts.items() if ".h." in name)
        shards = ranks if strategy in ("zero2", "fsdp") else 1
        expected = (total / shards, total / shards, state / (1 if strategy == "ddp" else ranks))
        [found] = re.findall(KINDS, out)
        # With zero1, ranks own whole parameters.
        tolerance = 0.3 if strategy == "zero1" else 0.03
        assert [*map(float, found)] == pytest.approx(expected, rel=tolerance), strategy
        if device == "cuda":
            assert read_rows(tmp_path / strategy)[0]["memory"] * 1024 > sum(expected)
