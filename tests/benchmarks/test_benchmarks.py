"""`python -m benchmarks` measures and prints rows. The figures are not tested."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.__main__ import run
from mingpt.program import run_program as exit_status_of
from tests.helpers import ROOT, write_text

TINY = (
    "--model.n_layer 1 --model.n_head 2 --model.n_embd 16 --data.block_size 16 --trainer.batch_size 4 "
    "--trainer.threads 1 --pairs 2 --seconds 0"
)
# The parts of nanoGPT that a step needs.
MODEL = """
import torch

class GPT(torch.nn.Embedding):
    def __init__(self, config):
        print("number of parameters: 0.00M")
        super().__init__(config.vocab_size, config.vocab_size)
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
    def forward(self, idx, targets):
        logits = super().forward(idx)
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    write_text(tmp_path / "text.txt")
    return tmp_path


def measure(words: list[str], folder: Path) -> int:
    argv = [word.replace("FOLDER", str(folder)) for word in words]
    return exit_status_of(run, [*argv, "--data.path", f"{folder}/text.txt", *TINY.split()])


def rows(printed: str) -> dict[str, float]:
    """Returns the medians by the names of the measurements."""
    found = re.findall(r"^\| (.+), \d layers .* \| ([\d.]+) \| [\d.]+ to [\d.]+ \|$", printed, re.MULTILINE)
    return {name: float(median) for name, median in found}


def test_a_slower_side_has_a_larger_time(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = "--model.n_layer 16 --trainer.save_overhead 0.02"
    assert measure(["ab", slow, ""], folder) == 0
    printed = capfd.readouterr()
    [(name, ratio)] = rows(printed.out).items()
    assert (name, printed.err) == (f"{slow} / default", "")
    assert ratio > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("ab '--distributed.strategy zero1' '' --ranks 2", "--distributed.strategy zero1 / default"),
        ("nanogpt FOLDER", "nanogpt / this program"),
        (f"checkout {ROOT}", f"{ROOT} / this program"),
    ],
)
def test_each_benchmark_prints_rows(words: str, name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert measure(shlex.split(words), folder) == 0
    printed = capfd.readouterr()
    assert (rows(printed.out).keys(), printed.err) == ({name}, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("everything", "command line: everything is not a benchmark"),
        ("nanogpt nowhere", "command line: there is no model.py in nowhere"),
        ("ab '' '' --model.dropout 2", "default: model.dropout (in the command line): found '2', must be less"),
        ("ab '--model.layers 3' ''", "--model.layers 3: model.layers (in the command line) is not known"),
        ("ab '--trainer.precision fp16' ''", "--trainer.precision fp16: trainer.precision is fp16, which needs a CUDA"),
        pytest.param("ab '' '' --ranks 5", "default: trainer.batch_size is 4, fewer", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_one_message(words: str, message: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert measure(shlex.split(words), folder) == 2
    printed = capfd.readouterr()
    assert re.fullmatch(f".*error: {re.escape(message)}.*\n", printed.err)
    assert rows(printed.out) == {}
