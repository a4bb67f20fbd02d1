"""Evaluation and samples during training have the same bits on any number of ranks, and do not change training."""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import (
    NO_DROPOUT,
    assert_equal_snapshots,
    loss_curve,
    newest_snapshot,
    open_trainer,
    read_rows,
    run_args,
    run_each_captured,
    run_program,
    run_ranks,
    train_losses,
    write_text,
)

from mingpt.config import GPTConfig
from mingpt.evaluation import SAMPLE_LENGTH, evaluate, generate_sample
from mingpt.generation import generate
from mingpt.utils.logging import configure_logging
from mingpt.utils.metrics import MetricsLogger
from model import GPT


def samples(run_dir: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["text"]) for row in read_rows(run_dir, "sample")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders of training with samples and without."""
    folder = tmp_path_factory.mktemp("evaluation")
    text = write_text(folder / "text.txt")
    argvs = [run_args(folder / str(every), text, trainer__sample_every=every) for every in (None, 5)]
    assert [status for status, _, _ in run_ranks(1, run_each_captured, argvs, tmp_path=folder)[0]] == [0, 0]
    return folder


def test_samples_change_no_bit_of_training_and_evaluation(folder: Path) -> None:
    """With dropout, whose random numbers a sample does not use."""
    assert_equal_snapshots(folder / "None", folder / "5")
    assert loss_curve(folder / "None") == loss_curve(folder / "5")
    without, with_samples = (
        [(row["step"], row["val_loss"]) for row in read_rows(folder / name, "eval")] for name in ("None", "5")
    )
    assert without == with_samples
    assert samples(folder / "None") == []
    assert [step for step, _ in samples(folder / "5")] == [5, 10, 12]


def test_the_snapshot_generates_the_same_sample(folder: Path) -> None:
    snapshot = newest_snapshot(folder / "5")
    vocabulary = snapshot["vocabulary"]
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=len(vocabulary), block_size=16))
    model.load_state_dict(snapshot["model"])
    generator = torch.Generator().manual_seed(1)
    tokens = generate(model, [torch.zeros(1, dtype=torch.long)], SAMPLE_LENGTH, temperature=0.8, generator=generator)
    assert samples(folder / "5")[-1] == (12, "".join(vocabulary[int(token)] for token in tokens))


def test_evaluation_and_samples_are_equal_on_any_number_of_ranks(folder: Path) -> None:
    """The evaluation of equal weights to the last bit, a sample after steps that differ by rounding errors."""
    [expected] = run_ranks(1, _evaluate, folder, ["ddp"], tmp_path=folder)[0]
    for ranks, strategies in ((2, ["zero1", "fsdp"]), (3, ["ddp", "zero2"])):
        for results in run_ranks(ranks, _evaluate, folder, strategies, tmp_path=folder):
            assert results == [expected] * len(strategies), (ranks, strategies)


def _evaluate(folder: Path, strategies: list[str]) -> list[tuple[float, str]]:
    results = []
    for name in strategies:
        run_dir = folder / f"{name}-{os.environ.get('WORLD_SIZE')}"
        argv = run_args(run_dir, folder / "text.txt", distributed__strategy=name, **NO_DROPOUT)
        with open_trainer(*argv, rendezvous=name) as trainer:
            loss = evaluate(trainer.strategy, trainer.val_data, batch_size=3)
            train_losses(trainer, 3)
            results.append((loss, generate_sample(trainer.strategy, trainer.corpus.vocabulary, seed=1)))
    return results


def test_cudnn_attention_is_off_for_samples_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_INIT_METHOD", "file:///unused")
    states = set()
    with open_trainer(*run_args(folder / "cudnn", folder / "text.txt")) as trainer:
        hook = lambda *args: states.add((model.training, torch.backends.cuda.cudnn_sdp_enabled()))  # noqa: E731
        model = trainer.strategy.full_model
        model.register_forward_hook(hook)
        generate_sample(trainer.strategy, trainer.corpus.vocabulary, seed=1)
        train_losses(trainer, 1)
    assert states == {(False, False), (True, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"trainer__compile": True}, {"trainer__precision": "bf16", "distributed__strategy": "fsdp"}]
)
def test_samples_of_compiled_and_of_sharded_bf16_blocks(options: dict, text: Path, tmp_path: Path) -> None:
    """Nothing is compiled for a sample, in which each character has a shape of its own."""
    size = {"trainer__sample_every": 6, "trainer__micro_batch_size": 1, "trainer__batch_size": 2}
    done = run_program("main.py", *run_args(tmp_path / "run", text, **size, **options), TORCH_LOGS="recompiles")
    assert done.returncode == 0, done.stderr
    assert "cache" not in done.stderr  # which a failed guard on the cache's length would name
    assert [len(text) for _, text in samples(tmp_path / "run")] == [SAMPLE_LENGTH, SAMPLE_LENGTH]


def test_control_characters_of_a_sample_are_recorded_but_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging()
    metrics = MetricsLogger(tmp_path, 0, 9)
    metrics.log_sample(3, "\nab\x1b[2Jc\rd\n\te\n")
    metrics.close()
    assert capsys.readouterr().out[21:] == "step 3 writes:\n    ab\ufffd[2Jc\ufffdd\n    \te\n"
    [row] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (row["event"], row["step"], row["text"]) == ("sample", 3, "\nab\x1b[2Jc\rd\n\te\n")
