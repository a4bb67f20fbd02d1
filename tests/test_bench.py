"""The bench measures and prints its rows; what the figures are is the machine's affair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import run_program

from bench import rows, run
from benchmarks import cases, harness
from benchmarks.cases import CASES, MULTI_RANK_CASES
from benchmarks.harness import Bench, Row, Shape, SkippedError, row
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext
from mingpt.utils.progress import run_script

TINY = (
    "--model.n_embd",
    "16",
    "--model.n_head",
    "2",
    "--model.n_layer",
    "1",
    "--data.block_size",
    "16",
    "--trainer.threads",
    "1",
)

# As much of each as a step asks for.
MODEL = """
import torch
from dataclasses import dataclass

class GPTConfig:
    def __init__(self, **sizes): self.sizes = sizes

@dataclass
class OptimizerConfig:
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters: 0.00M")
        size = config.sizes["vocab_size"]
        self.table = torch.nn.Embedding(size, size)
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
    def forward(self, idx, targets):
        logits = self.table(idx)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def create_optimizer(model, config):
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
"""
DATASET = """
import torch
from dataclasses import dataclass
from pathlib import Path

@dataclass
class DataConfig:
    path: str = None
    block_size: int = None

class CharDataset:
    def __init__(self, config):
        self.text, self.T = Path(config.path).read_text(), config.block_size
    def __len__(self):
        return len(self.text) - self.T
    def __getitem__(self, i):
        window = torch.tensor([ord(c) for c in self.text[i : i + self.T + 1]])
        return window[:-1], window[1:]
"""


@pytest.fixture
def bench(tmp_path: Path, one_thread: None) -> Bench:
    """A bench of tiny shapes, a short text and one pair, with clones of both others."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "char_dataset.py").write_text(DATASET)
    made = Bench(DistributedContext(RankInfo()), tmp_path, TINY, tmp_path, tmp_path, pairs=1, timeout=0.0)
    made.text.write_text(made.text.read_text()[:50_000])
    return made


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("trainer", 1, marks=pytest.mark.slow),
        ("nanogpt", 3),
        ("tutorial", 3),
        ("peak", 2),
        ("fetch", 3),
        ("encoding", 2),
        ("optimizer", 1),
        pytest.param("snapshots", 3, marks=pytest.mark.slow),
    ],
)
def test_a_measurement_of_one_process_gives_rows(bench: Bench, name: str, count: int, monkeypatch) -> None:
    monkeypatch.setattr(cases, "has_bf16", lambda device: (False, "for this test"))
    monkeypatch.setattr(Bench, "mode", harness.WITH_BF16)  # without, it compiles
    found = list(rows(name, bench))
    assert len(found) == count
    for each in found:
        if isinstance(each.figure, str):
            assert each.figure == "skipped: no bf16 hardware"
        else:
            assert each.smallest is None or each.smallest <= each.figure <= each.largest
            assert each.figure > 0 or "save_every" in each.what


@pytest.mark.slow
def test_start_is_in_seconds(bench: Bench) -> None:
    [found] = rows("start", bench)
    assert 0 < found.figure < 60
    assert found.cells[1].endswith(" s")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nanogpt", "its folder is not given"),
        ("tutorial", "its folder is not given"),
        ("ranks", "2 ranks on 1 core"),
        ("compile", "no C++ compiler"),
    ],
)
def test_what_cannot_be_measured_says_why(bench: Bench, name: str, why: str, monkeypatch) -> None:
    bench.nanogpt = bench.tutorial = None
    monkeypatch.setattr(harness, "cores", lambda: 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    [found] = rows(name, bench)
    assert found.figure.startswith("skipped: ")
    assert why in found.figure
    assert found.cells[1:3] == [found.figure, ""]


def test_several_ranks_make_only_the_measurements_of_groups(bench: Bench) -> None:
    bench.context.world_size = 2
    for name in CASES:
        if name not in MULTI_RANK_CASES:
            [found] = rows(name, bench)
            assert found.figure.startswith("skipped: "), name


def test_a_ratio_is_measured_in_turn(bench: Bench) -> None:
    calls: list[str] = []
    bench.pairs = 2
    ratios = bench.ratio(lambda: calls.append("A"), lambda: calls.append("B"), lambda: calls.append("-"), times=2)
    assert "".join(calls) == "-A-A-B-B" + 2 * "-AA-BB"
    assert len(ratios) == 2


def test_a_row_shows_median_spread_and_a_missed_goal() -> None:
    assert row("x", [3.0, 1.0, 2.0], least=1.5).cells == ["x", "2", "1 to 3", "at least 1.5"]
    assert row("x", [0.004, 0.012], "%", most=0.005).cells == ["x", "0.8%", "0.4% to 1.2%", "at most 0.5% (missed)"]
    assert row("x", [1234.5], "steps").cells == ["x", "1,234 steps", "", "none"]
    assert Row("x", "skipped: for a reason", least=1.5).cells == ["x", "skipped: for a reason", "", "at least 1.5"]


def test_json_rows_parse(capsys, monkeypatch) -> None:
    def measured(bench: Bench) -> Iterator[Row]:
        yield row("one", [1.0, 2.0], least=1.0)
        raise SkippedError("a reason")

    monkeypatch.setitem(CASES, "start", measured)
    monkeypatch.setattr("sys.argv", ["bench.py", "--json", "start", *TINY])
    assert run_script(run) == 0
    made, skipped = map(json.loads, capsys.readouterr().out.splitlines())
    assert (made["figure"], made["smallest"], made["largest"], made["met"]) == (1.5, 1.0, 2.0, True)
    assert made["command"].startswith("python bench.py start --data.block_size 16 --model.n_layer 1")
    assert skipped["figure"] == "skipped: a reason"


def test_the_table_names_the_machine_and_the_command(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py", "nanogpt"])
    assert run_script(run) == 0
    heading, _, header, line, skipped = capsys.readouterr().out.splitlines()
    assert heading.startswith("## ")
    assert f"PyTorch {torch.__version__}" in heading
    assert header == "| what | figure | smallest to largest | goal | command |"
    assert line.count("---") == 5
    assert "| skipped: its folder is not given |" in skipped
    assert skipped.endswith("| `python bench.py nanogpt --nanogpt FOLDER` |")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("everything",), "error: there is no measurement everything; there are: trainer, "),
        (("start", "--model.n_embed", "8"), "error: command line: unrecognized arguments: --model.n_embed"),
        (("nanogpt", "--nanogpt", "nowhere"), "error: --nanogpt: there is no model.py in nowhere"),
        (("start", "--model.n_layer", "0"), "error: model.n_layer is 0, must be at least 1"),
    ],
)
def test_a_mistake_is_one_message(words: tuple[str, ...], said: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py", *words])
    assert run_script(run) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(said)
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_shapes_are_words() -> None:
    words = Shape(4, 2, 128, 64, 12).words
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--model.n_layer": "4",
        "--model.n_head": "2",
        "--model.n_embd": "128",
        "--data.block_size": "64",
        "--trainer.batch_size": "12",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("ranks", 2), ("reduction", 2), ("strategies", 6), ("pipeline", 4), ("compile", 3)]
)
def test_the_program_measures_what_takes_other_ranks_or_a_compiler(name: str, count: int) -> None:
    done = run_program("bench.py", name, "--json", *TINY, "--model.n_layer", "2")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == count, done.stdout
    assert all(each["name"] == name for each in found)
    assert all(each["figure"] == "never" or each["figure"] > 0 for each in found)
