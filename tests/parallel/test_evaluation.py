"""Evaluation and samples during training have the same bits on any number of ranks, and do not change training."""

import os
import signal
from pathlib import Path

from mingpt.parallel.evaluation import SAMPLE_LENGTH, generate_sample
from tests.helpers import (
    NO_DROPOUT,
    assert_equal_snapshots,
    call_before,
    loss_curve,
    newest_snapshot,
    open_trainer,
    read_rows,
    run_args,
    run_captured,
    run_on,
    run_ranks,
    train_losses,
    wait_until,
    write_text,
)
from trainer import Trainer

PROMPT = "does bob eat figs"  # longer than the window of the small runs


def samples(run_dir: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["text"]) for row in read_rows(run_dir, "sample")]


def prompt_of(text: Path) -> str:
    """The prompt of a run with default keys: the first line that begins in the last tenth."""
    content = text.read_text()
    start = int(0.9 * len(content))
    return content[start : start + 20]


def test_samples_on_two_ranks_and_after_a_restart_change_no_bit(text: Path, tmp_path: Path) -> None:
    """With dropout: a sample does not use its random numbers."""
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    sampling = {"trainer__sample_every": 3, "optimizer__decay_steps": 12}
    argvs = [run_args(plain, text), *(run_args(sampled, text, **sampling, trainer__max_steps=last) for last in (6, 12))]
    run_on("cpu", 2, argvs, tmp_path)
    assert_equal_snapshots(plain, sampled)
    assert loss_curve(plain) == loss_curve(sampled)
    assert {row["val_loss"] for row in read_rows(plain, "eval")} < {
        row["val_loss"] for row in read_rows(sampled, "eval")
    }
    assert samples(plain) == []
    length = len(prompt_of(text)) + SAMPLE_LENGTH
    assert [(step, len(sample)) for step, sample in samples(sampled)] == [(step, length) for step in (3, 6, 9, 12)]
    assert all(sample.startswith(prompt_of(text)) for _, sample in samples(sampled))


def test_evaluation_and_samples_are_equal_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The evaluation of equal weights to the last bit, a sample after steps that differ by rounding errors."""
    write_text(tmp_path / "text.txt")
    [expected] = run_ranks(1, _evaluate, tmp_path, ["ddp"], tmp_path=tmp_path)[0]
    for ranks, strategies in ((2, ["zero1", "fsdp"]), (3, ["ddp", "zero2"])):
        for results in run_ranks(ranks, _evaluate, tmp_path, strategies, tmp_path=tmp_path):
            assert results == [expected] * len(strategies), (ranks, strategies)


def _evaluate(folder: Path, strategies: list[str]) -> list[tuple[float | None, str]]:
    """For `run_ranks`: returns the loss of an evaluation, and a sample."""
    options = NO_DROPOUT | {"trainer__batch_size": 40, "trainer__micro_batch_size": None}
    results = []
    for name in strategies:
        run_dir = folder / f"{name}-{os.environ.get('WORLD_SIZE')}"
        argv = run_args(run_dir, folder / "text.txt", distributed__strategy=name, **options)
        with open_trainer(*argv, rendezvous=name) as trainer:
            trainer.evaluate()
            loss = trainer.progress.val_loss
            train_losses(trainer, 3)
            tokenizer = trainer.corpus.tokenizer
            sample = generate_sample(trainer.strategy, tokenizer.encode(PROMPT, "prompt").tolist(), seed=1)
            results.append((loss, tokenizer.decode(sample)))
    return results


def test_a_signal_in_an_evaluation_stops_the_run_after_the_next_step(text: Path, tmp_path: Path) -> None:
    """Two ranks stop after the evaluation of step 4. In the evaluation of the last step, nothing is left to do."""
    argv = run_args(tmp_path / "run", text, trainer__max_steps=8, trainer__save_every=100)
    assert set(run_ranks(2, _signal_evaluation, *argv, tmp_path=tmp_path)) == {143}
    assert newest_snapshot(tmp_path / "run")["step"] == 5
    assert [row["step"] for row in read_rows(tmp_path / "run", "eval")] == [4]
    assert run_ranks(1, _signal_evaluation, *argv, tmp_path=tmp_path) == [0]
    assert newest_snapshot(tmp_path / "run")["val_loss"] == read_rows(tmp_path / "run", "eval")[-1]["val_loss"]
    assert [row["signal"] for row in read_rows(tmp_path / "run", "stop")] == ["SIGTERM", None]


def _signal_evaluation(*argv: str) -> int:
    """For `run_ranks`: rank 0 gets a SIGTERM when its first evaluation begins. Returns the exit status."""

    def send_signal(trainer: Trainer) -> None:
        if trainer.context.rank == 0 and not trainer.signals.signal:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: trainer.signals.signal != 0, "the signal")

    call_before(Trainer, "evaluate", send_signal)
    return run_captured(*argv)[0]
