"""`python -m benchmarks` measures its cases and prints their rows. The figures are not tested."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import collectives, learning
from benchmarks.__main__ import run, run_case
from benchmarks.cases import CASES, MULTI_RANK_CASES
from benchmarks.harness import Bench, Row, median_row, to_options
from mingpt.config.schema import DistributedConfig
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import RankInfo
from mingpt.errors import UserError
from mingpt.program import run_program as exit_status_of
from tests.helpers import ROOT, TORCHRUN, open_process_group, run_program, run_ranks, write_text

TINY = to_options(
    {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "data.block_size": 16, "trainer.threads": 1}
)

# Parts of both baselines that a step needs.
MODEL = """
import torch
from dataclasses import dataclass

@dataclass
class OptimizerConfig:
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

class GPTConfig:
    def __init__(self, **sizes): self.sizes = sizes

class GPT(torch.nn.Embedding):
    def __init__(self, config):
        print("number of parameters: 0.00M")
        super().__init__(config.sizes["vocab_size"], config.sizes["vocab_size"])
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
    def forward(self, idx, targets):
        logits = super().forward(idx)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

def create_optimizer(model, config):
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
"""


@pytest.fixture
def bench(tmp_path: Path, one_thread: None) -> Bench:
    """A bench with a tiny model, a short text, one pair and both baselines."""
    (tmp_path / "model.py").write_text(MODEL)
    both = {"nanogpt": tmp_path, "tutorial": tmp_path}
    context = DistributedContext(RankInfo(), DistributedConfig())
    bench = Bench(context, tmp_path, TINY, baselines=both, pairs=1, min_run_time=0.0)
    bench.text.write_text(bench.text.read_text()[:50_000])
    return bench


# case -> number of rows
FAST = {"nanogpt": 2, "tutorial": 2, "speed": 1}
SLOW = {"trainer": 1, "snapshots": 1, "contention": 6, "compile": 1, "optimizer": 1, "sampling": 2}


@pytest.mark.parametrize(
    ("name", "count"), [*FAST.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]
)
def test_a_case_yields_rows_and_prints_nothing(
    bench: Bench, name: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(run_case(name, bench))
    assert len(rows) == count
    assert all(row.figure > 0 for row in rows)
    assert capsys.readouterr().out == ""


def _measure_on_ranks(folder: Path, names: list[str]) -> dict[str, list[Row]]:
    """For `run_ranks`: returns the rows of cases that need several ranks."""
    collectives.SIZES = (1000,)  # type: ignore[assignment]
    with open_process_group() as context:
        bench = Bench(context, folder, [*TINY, "--model.n_layer", "2"], pairs=1, min_run_time=0.0)
        return {name: list(run_case(name, bench)) for name in names}


@pytest.mark.slow
def test_cases_of_several_ranks_yield_rows(tmp_path: Path) -> None:
    names = ["strategies", "reduction", "pipeline"]
    rows = run_ranks(2, _measure_on_ranks, tmp_path, names, tmp_path=tmp_path, timeout=240)[0]
    assert [len(rows[name]) for name in names] == [3, 1, 1]
    assert all(row.figure > 0 for found in rows.values() for row in found)


def test_the_bus_bandwidth_of_collectives_agrees_with_nccl_tests(tmp_path: Path) -> None:
    rows = run_ranks(3, _measure_on_ranks, tmp_path, ["collectives"], tmp_path=tmp_path)[0]["collectives"]
    label = r"(\w+), 996 bytes, 3 ranks, gloo: (\S+) s, each rank sends (\S+) bytes"
    labels = [re.fullmatch(label, row.what) for row in rows]
    found = [label.groups() for label in labels if label is not None]
    most = 664  # bytes: two of three parts
    sent = {"broadcast": 996, "reduce": 996, "send_recv": 996, "all_reduce": 2 * most, "ring_all_reduce": 2 * most}
    others = dict.fromkeys(["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"], most)
    assert {name: int(size.replace(",", "")) for name, _, size in found} == sent | others
    for (_, seconds, size), row in zip(found, rows, strict=False):
        assert row.figure == pytest.approx(int(size.replace(",", "")) / float(seconds) / 1e9, rel=0.02)


@pytest.mark.slow
def test_the_program_runs_under_torchrun() -> None:
    launcher = (*TORCHRUN, "--nproc_per_node=2")
    done = run_program(*launcher, "-m", "benchmarks", "strategies", *TINY, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| `strategies` | step time: ") == 3


def test_a_case_that_cannot_run_is_skipped_with_the_reason(bench: Bench) -> None:
    bench.baselines = {"nanogpt": None}
    for name, reason in {"nanogpt": "its folder is not given", "strategies": "it needs several ranks"}.items():
        [row] = run_case(name, bench)
        assert row.figure.startswith(f"skipped: {reason}")
    bench.context.world_size = 2
    for name in CASES.keys() - set(MULTI_RANK_CASES):
        [row] = run_case(name, bench)
        assert row.figure == "skipped: it runs in a single process", name


def test_measurements_alternate_and_wait_for_a_gpu_before_they_read_the_clock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append(device.type[0]))
    monkeypatch.setattr(time, "perf_counter", lambda: calls.append("t") or float(len(calls)))
    bench.time_calls(lambda: calls.append("A"))
    assert "".join(calls) == "tAt"
    calls.clear()
    bench.context.device = torch.device("cuda", 0)
    bench.min_run_time = 6.0  # seconds; a call takes 3 on the simulated clock
    bench.ratio(lambda: calls.append("A"), lambda: calls.append("B"))
    assert "".join(calls) == "AB" + "ctActctBct" + "ctAActctBBct"


def test_rows_have_name_median_and_range(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A case whose options conflict is skipped."""

    def case(bench: Bench) -> Iterator[Row]:
        yield median_row("one", [3.0, 1.0, 1234.5], " steps")
        raise UserError("a reason")

    monkeypatch.setitem(CASES, "speed", case)
    assert exit_status_of(run, ["speed", *TINY]) == 0
    heading, _, header, _, row, skipped = capsys.readouterr().out.splitlines()
    assert heading.endswith(f"PyTorch {torch.__version__}")
    assert header == "| name | measurement | median | range |"
    assert row == "| `speed` | one | 3 steps | 1 steps to 1,234 steps |"
    assert skipped == "| `speed` | speed | skipped: a reason |  |"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("everything", "there is no benchmark everything; there are: trainer, "),
        ("nanogpt --nanogpt nowhere", "--nanogpt: there is no model.py in nowhere"),
        ("speed --model.n_layer 0", "model.n_layer (in the command line): found 0, must be greater"),
    ],
)
def test_a_wrong_option_is_one_message(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status_of(run, options.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_time_to_loss_compares_with_the_recipe(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "RECIPE_STEPS", 20)
    text = str(write_text(bench.folder / "words.txt"))
    bench.options = [*TINY, "--trainer.batch_size", "8", "--optimizer.warmup_steps", "2", "--data.path", text]
    [row] = run_case("time_to_loss", bench)
    assert 0 < row.smallest <= row.figure <= row.largest
    assert row.what.count(" after 20 steps") == 3
    losses = iter([9.0, math.nan, 1.0])
    monkeypatch.setattr(learning, "train_recipe", lambda *args: learning.Run(1.0, 20, 1.5))
    monkeypatch.setattr(learning, "train_to_loss", lambda *args: learning.Run(1.0, 3, next(losses)))
    [row] = run_case("time_to_loss", bench)
    assert row.figure == "not reached by 2 of 3 runs"


def test_the_recipe_has_nanogpts_schedule() -> None:
    rates = [learning.recipe_learning_rate(step) for step in (0, 99, 100, 1050, 2000)]
    assert rates == pytest.approx([1e-3 / 101, 1e-3 * 100 / 101, 1e-3, 5.5e-4, 1e-4])
