"""What a run shows of its model: samples that are the same everywhere and leave training alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import (
    assert_equal_snapshots,
    loss_curve,
    newest_snapshot,
    read_rows,
    run_args,
    run_program,
    run_ranks,
    train_main,
)

from mingpt.config import GPTConfig
from mingpt.evaluation import SAMPLE_LENGTH
from mingpt.generation import generate
from mingpt.utils.metrics import Metrics
from model import GPT


def samples(run: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["text"]) for row in read_rows(run, "sample")]


def test_samples_change_no_bit_of_training(text: Path, tmp_path: Path) -> None:
    """With dropout, whose random numbers a sample must not take."""
    for name, every in (("without", "null"), ("with", 5)):
        assert run_ranks(
            1, train_main, *run_args(tmp_path / name, text, trainer__sample_every=every), tmp_path=tmp_path
        ) == [0]
    assert_equal_snapshots(tmp_path / "without", tmp_path / "with")
    assert loss_curve(tmp_path / "without") == loss_curve(tmp_path / "with")
    assert samples(tmp_path / "without") == []
    assert [step for step, _ in samples(tmp_path / "with")] == [5, 10, 12]


def test_a_sample_is_what_the_snapshot_writes(text: Path, tmp_path: Path) -> None:
    assert run_ranks(1, train_main, *run_args(tmp_path / "run", text, trainer__sample_every=99), tmp_path=tmp_path) == [
        0
    ]
    [(step, written)] = samples(tmp_path / "run")
    snapshot = newest_snapshot(tmp_path / "run")
    vocabulary = snapshot["vocabulary"]
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=len(vocabulary), block_size=16))
    model.load_state_dict(snapshot["model"])
    generator = torch.Generator().manual_seed(1)
    start = torch.zeros(1, dtype=torch.long)
    again = generate(model, [start], SAMPLE_LENGTH, temperature=0.8, generator=generator)
    assert (step, written) == (12, "".join(vocabulary[int(token)] for token in again))


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1", "zero2"))]
)
def test_ranks_write_together_what_one_process_writes(strategy: str, text: Path, tmp_path: Path) -> None:
    knobs = {"trainer__sample_every": 99, "model__dropout": 0.0}
    assert run_ranks(1, train_main, *run_args(tmp_path / "one", text, **knobs), tmp_path=tmp_path) == [0]
    argv = run_args(tmp_path / "two", text, distributed__strategy=strategy, **knobs)
    assert run_ranks(2, train_main, *argv, tmp_path=tmp_path) == [0, 0]
    assert samples(tmp_path / "two") == samples(tmp_path / "one")
    assert [step for step, _ in samples(tmp_path / "one")] == [12]


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [{"trainer__compile": True}, {"trainer__precision": "bf16", "distributed__strategy": "fsdp"}]
)
def test_samples_of_compiled_blocks_and_of_sharded_ones_in_bf16(knobs: dict, text: Path, tmp_path: Path) -> None:
    """Nothing is compiled for a sample, which has a shape for each character."""
    argv = run_args(tmp_path / "run", text, trainer__sample_every=6, trainer__micro_batch_size=1, **knobs)
    done = run_program("main.py", *argv, "--trainer.batch_size", "2", TORCH_LOGS="recompiles")
    assert done.returncode == 0, done.stderr
    assert "cache" not in done.stderr  # as guards would name what differs
    assert [len(written) for _, written in samples(tmp_path / "run")] == [SAMPLE_LENGTH, SAMPLE_LENGTH]


def test_what_would_move_the_cursor_is_not_shown_but_recorded(tmp_path: Path, capsys) -> None:
    metrics = Metrics(tmp_path, 0, 9)
    metrics.sample(3, "\nab\x1b[2Jc\rd\n\te\n")
    metrics.close()
    assert capsys.readouterr().out[21:] == "step 3 writes:\n    ab\ufffd[2Jc\ufffdd\n    \te\n"
    [row] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (row["event"], row["step"], row["text"]) == ("sample", 3, "\nab\x1b[2Jc\rd\n\te\n")
