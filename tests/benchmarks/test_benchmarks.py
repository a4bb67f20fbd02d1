"""`python -m benchmarks` measures and prints rows. The figures are not tested."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.__main__ import run
from mingpt.program import run_program as exit_status_of
from tests.helpers import ROOT

TINY = (
    "--model.n_layer 1 --model.n_head 2 --model.n_embd 16 --data.block_size 16 --trainer.batch_size 4 "
    "--trainer.threads 1 --pairs 1 --steps 10"
)


def measure(words: str, text: Path) -> int:
    return exit_status_of(run, [*shlex.split(words), "--data.path", str(text), *TINY.split()])


def ratios(printed: str) -> list[float]:
    medians = re.findall(r"^\| .+ \| ([\d.]+) \| [\d.]+ to [\d.]+ \|$", printed, re.MULTILINE)
    return [float(median) for median in medians]


def test_a_slower_side_has_a_larger_time(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert measure("ab '--model.n_layer 16' ''", text) == 0
    [ratio] = ratios(capfd.readouterr().out)
    assert ratio > 2


@pytest.mark.slow
@pytest.mark.parametrize("words", ["ab '--distributed.strategy zero1' '' --ranks 2", f"checkout {ROOT}"])
def test_each_benchmark_prints_a_row(words: str, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert measure(words, text) == 0
    assert ratios(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("everything", "command line: everything is not a benchmark"),
        ("checkout nowhere", "command line: checkout nowhere is not a benchmark"),
        ("ab '--model.layers 3' ''", "model.layers (in the command line) is not known"),
    ],
)
def test_a_mistake_is_one_message(words: str, message: str, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert measure(words, text) == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert not ratios(printed.out)
