"""`python -m benchmarks` measures its cases and prints their rows, whose figures are not tested."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.__main__ import run, run_case
from benchmarks.cases import CASES, MULTI_RANK_CASES
from benchmarks.harness import Bench, Row, SkippedError, median_row, to_options
from mingpt.config.parser import read_config
from mingpt.config.schema import DistributedConfig
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import RankInfo
from mingpt.program import run_program as exit_status_of
from tests.helpers import ROOT, process_group, run_program, run_ranks

# Without a batch size: cases set their own.
TINY = to_options(
    {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "data.block_size": 16, "trainer.threads": 1}
)

# The parts of both baselines that a step needs.
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
    baselines = {"nanogpt": tmp_path, "tutorial": tmp_path}
    bench = Bench(
        DistributedContext(RankInfo(), DistributedConfig()), tmp_path, TINY, baselines, pairs=1, min_run_time=0.0
    )
    bench.text.write_text(bench.text.read_text()[:50_000])
    return bench


# case -> number of rows
FAST = {"nanogpt": 2, "tutorial": 2, "optimizer": 1, "speed": 1}
SLOW = {"trainer": 1, "snapshots": 1, "sampling": 2}


@pytest.mark.parametrize(
    ("name", "count"), [*FAST.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]
)
def test_a_case_yields_rows_and_prints_nothing(
    bench: Bench, name: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(run_case(name, bench))
    assert len(rows) == count
    for row in rows:
        assert row.smallest is None or row.smallest <= row.figure <= row.largest
        assert row.figure > 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["trainer", "snapshots"])
def test_ctrl_c_ends_a_case_of_whole_runs_at_once(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def interrupted(action: Callable[[], Any], times: int = 1) -> float:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        action()
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it continues")

    monkeypatch.setattr(bench, "time_calls", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(CASES[name](bench))


def measure_on_ranks(folder: Path) -> dict[str, list[Row]]:
    """For `run_ranks`: the rows of the cases that need several ranks."""
    config = read_config(["--distributed.init_method", os.environ["TEST_INIT_METHOD"]]).distributed
    with process_group(config, needs_group=True) as context:
        bench = Bench(context, folder, [*TINY, "--model.n_layer", "2"], pairs=1, min_run_time=0.0)
        return {name: list(run_case(name, bench)) for name in MULTI_RANK_CASES}


@pytest.mark.slow
def test_cases_of_several_ranks_yield_rows(tmp_path: Path) -> None:
    rows = run_ranks(2, measure_on_ranks, tmp_path, tmp_path=tmp_path, timeout=240)[0]
    assert [len(rows[name]) for name in MULTI_RANK_CASES] == [3, 1, 1]
    assert all(row.figure > 0 for found in rows.values() for row in found)


@pytest.mark.slow
def test_the_program_compiles_starts_ranks_and_prints_rows_as_json() -> None:
    process = run_program("-m", "benchmarks", "reduction", "compile", "--json", *TINY, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["reduction", "compile", "compile"]
    assert rows[0]["what"].endswith(", 2 ranks")
    assert all(row["figure"] == "never" or row["figure"] > 0 for row in rows)


def test_a_skipped_case_gives_the_reason(bench: Bench, monkeypatch) -> None:
    bench.baselines = {"nanogpt": None, "tutorial": None}
    monkeypatch.setattr(harness, "available_cores", lambda: {0})
    monkeypatch.setenv("CXX", "no-such-compiler")
    no_folder = "its folder is not given"
    no_cores = "it starts 2 ranks, which need a core or GPU each; found 1"
    reasons = {
        "nanogpt": no_folder,
        "tutorial": no_folder,
        "time_to_loss": no_folder,
        "pipeline": no_cores,
        "compile": "no C++ compiler",
    }
    for name, reason in reasons.items():
        [row] = run_case(name, bench)
        assert row.figure.startswith("skipped: ")
        assert reason in row.figure
        assert row.cells[1:3] == [row.figure, ""]
    bench.context.world_size = 2
    for name in CASES.keys() - set(MULTI_RANK_CASES):
        [row] = run_case(name, bench)
        assert row.figure == "skipped: it is started by one process, and these are several", name


def test_measurements_of_a_ratio_alternate(bench: Bench) -> None:
    calls: list[str] = []
    bench.pairs = 2
    ratios = bench.ratio(lambda: calls.append("A"), lambda: calls.append("B"))
    assert "".join(calls) == 4 * "AB"
    assert len(ratios) == 2


def test_measurements_wait_for_a_gpu_before_they_read_the_clock(bench: Bench, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append(device.type[0]))
    monkeypatch.setattr(time, "perf_counter", lambda: calls.append("t") or float(len(calls)))
    bench.time_calls(lambda: calls.append("A"))
    assert "".join(calls) == "tAt"
    calls.clear()
    bench.context.device = torch.device("cuda", 0)
    bench.min_run_time = 6.0  # of the pretended clock, on which a call takes 3
    bench.ratio(lambda: calls.append("A"), lambda: calls.append("B"))
    assert "".join(calls) == "AB" + "ctActctBct" + "ctAActctBBct"


def test_the_device_is_that_of_main(capsys, monkeypatch) -> None:
    """A pretended GPU: its name is in the header."""

    def choose_device(backend: str, *ranks: int) -> torch.device:
        return torch.device("cpu" if backend == "gloo" else "cuda")

    monkeypatch.setattr("mingpt.distributed.context.choose_device", choose_device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr("sys.argv", ["benchmarks", "nanogpt"])
    assert exit_status_of(run, sys.argv[1:]) == 0
    assert capsys.readouterr().out.startswith("## NVIDIA H100 with ")
    monkeypatch.setattr("sys.argv", ["benchmarks", "nanogpt", "--distributed.backend", "gloo"])
    assert exit_status_of(run, sys.argv[1:]) == 0
    assert "NVIDIA" not in capsys.readouterr().out


def test_ranks_need_a_gpu_each(bench: Bench, monkeypatch) -> None:
    bench.context.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SkippedError, match="2 ranks, which need a core or GPU each; found 1"):
        list(bench.run_on_ranks("reduction"))


def test_a_row_has_median_and_range() -> None:
    assert median_row("x", [3.0, 1.0, 2.0]).cells == ["x", "2", "1 to 3"]
    assert median_row("x", [0.4, 1.2], "%").cells == ["x", "0.8%", "0.4% to 1.2%"]
    assert Row("x", 1234.5, unit=" steps").cells == ["x", "1,234 steps", ""]
    assert Row("x", "skipped: for a reason").cells == ["x", "skipped: for a reason", ""]


def test_json_rows_have_figures_and_command(capsys, monkeypatch) -> None:
    def case(bench: Bench) -> Iterator[Row]:
        yield median_row("one", [1.0, 2.0])
        raise SkippedError("a reason")

    monkeypatch.setitem(CASES, "optimizer", case)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--json", "optimizer", *TINY])
    assert exit_status_of(run, sys.argv[1:]) == 0
    row, skipped = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["name"], row["what"], row["figure"]) == ("optimizer", "one", 1.5)
    assert (row["smallest"], row["largest"]) == (1.0, 2.0)
    assert row["command"].startswith("python -m benchmarks optimizer --data.block_size 16 --model.n_layer 1")
    assert skipped["figure"] == "skipped: a reason"


def test_the_table_names_machine_and_command(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "nanogpt"])
    assert exit_status_of(run, sys.argv[1:]) == 0
    heading, _, header, line, skipped = capsys.readouterr().out.splitlines()
    assert heading.startswith("## ")
    assert f"PyTorch {torch.__version__}" in heading
    assert header == "| what | figure | smallest to largest | command |"
    assert line.count("---") == 4
    assert "| skipped: its folder is not given |" in skipped
    assert skipped.endswith("| `python -m benchmarks nanogpt --nanogpt FOLDER` |")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("everything", "there is no measurement everything; there are: trainer, "),
        ("optimizer --model.n_embed 8", "command line: unrecognized arguments: --model.n_embed"),
        ("nanogpt --nanogpt nowhere", "--nanogpt: there is no model.py in nowhere"),
        ("optimizer --bytes 1k", "--bytes is an option of collectives only"),
        ("collectives --bytes 1k 1x", "command line: argument --bytes: invalid size_in_bytes value: '1x'"),
        ("scale optimizer", "there is no measurement scale; there are: trainer, "),
        ("collectives --bytes 1k", "collectives need several ranks and --bytes: torchrun "),
        ("optimizer --model.n_layer 0", "model.n_layer (in the command line): found 0, must be greater"),
    ],
)
def test_a_wrong_option_is_one_message(options: str, message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", *options.split()])
    assert exit_status_of(run, sys.argv[1:]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_help_has_each_example_on_a_line_of_its_own(capsys) -> None:
    assert exit_status_of(run, ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.strip() for line in lines if re.match(r" +(python|torchrun) ", line)]
    assert len(examples) == 6
    assert examples[0] == "python -m benchmarks"
