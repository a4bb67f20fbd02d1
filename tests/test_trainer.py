import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sample
import trainer
from mingpt import program
from tests.faults.runs import assert_same_run
from tests.helpers import (
    NO_DROPOUT,
    loss_curve,
    main_process,
    read_rows,
    run_args,
    run_main,
    run_on,
    run_ranks,
    start_ranks,
    train_main,
    train_run,
    wait_for_step,
    write_text,
)
from tests.inside import call_before, newest_snapshot, open_trainer
from trainer import StepResult, Trainer


def test_a_non_finite_loss_ends_the_run_and_changes_no_snapshot(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert run_main(run_args(run_dir, text, trainer__max_steps=3)) == 0
    first = run_dir / "snapshots/step_00000003.pt"
    saved = first.read_bytes()
    # This learning rate overflows float32 within a few steps.
    options = {"optimizer__learning_rate": 1e30, "optimizer__grad_norm_clip": None}
    assert run_main(run_args(run_dir, text, trainer__max_steps=30, **options)) == 2
    message, newest = capsys.readouterr().err, newest_snapshot(run_dir)
    step = read_rows(run_dir)[-1]["step"] + 1
    assert re.match(r"error: step \d: the (norm of the gradient|validation loss) is not finite", message)
    assert "Lower optimizer.learning_rate (1e+30) or optimizer.grad_norm_clip (None)" in message
    assert newest["step"] in range(3, step)
    assert all(weight.isfinite().all() for weight in newest["model"].values())
    assert first.read_bytes() == saved


def test_gradients_are_scaled_to_the_largest_norm_allowed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_INIT_METHOD", "file:///unused")
    with open_trainer(*run_args(tmp_path / "run", text)) as trainer:
        strategy = trainer.strategy
        micro_batches = strategy.read(range(4), trainer.train_data)
        [target_counts] = trainer.context.begin_step(strategy.count_targets(micro_batches))
        strategy.forward_backward(micro_batches, target_counts)
        gradients = [parameter.grad for parameter in strategy.parameters.values()]
        norm = strategy.clip_grad_norm_(None)
        before = [gradient.clone() for gradient in gradients]
        torch.testing.assert_close(strategy.clip_grad_norm_(2 * norm.item()), norm, rtol=0, atol=0)
        torch.testing.assert_close(gradients, before, rtol=0, atol=0)
        torch.testing.assert_close(strategy.clip_grad_norm_(norm.item() / 2), norm, rtol=0, atol=0)
        torch.testing.assert_close(gradients, [gradient / 2 for gradient in before], rtol=1e-4, atol=0)


@dataclass
class WithTokens(trainer.Progress):
    """A field that somebody adds."""

    tokens: int = 100


def _count_tokens(argv: list[str]) -> list[int]:
    """Returns the field before and after a run."""

    def count(run: Any, result: StepResult) -> None:
        run.progress.tokens += len(result.batch)

    trainer.Progress = WithTokens  # type: ignore[misc]
    call_before(Trainer, "after_step", count)
    with open_trainer(*argv) as run:
        before = run.progress.tokens
        run.train()
        return [before, run.progress.tokens]


def test_a_field_that_is_added_to_progress_is_saved_and_has_its_default_in_older_snapshots(
    text: Path, tmp_path: Path
) -> None:
    train_run(tmp_path / "run", text, trainer__max_steps=2)
    for steps, expected in ((5, [100, 121]), (6, [121, 128])):
        argv = run_args(tmp_path / "run", text, trainer__max_steps=steps)
        assert run_ranks(1, _count_tokens, argv, tmp_path=tmp_path) == [expected]


SHORT = NO_DROPOUT | {"trainer__max_steps": 8}
EPOCH = {
    "model__dropout": 0.0,
    "trainer__max_steps": None,
    "trainer__max_epochs": 1,
    "trainer__batch_size": 80,
    "trainer__micro_batch_size": 30,
}
RUNS = {  # number of ranks -> run folder -> options, in this order
    3: {"3": SHORT, "epoch-3": EPOCH, "changing": SHORT | {"trainer__max_steps": 4}},
    2: {"2": SHORT, "changing": SHORT},
    1: {
        "1": SHORT,
        "unsplit": SHORT | {"trainer__micro_batch_size": None},
        "dropout": SHORT | {"model__dropout": 0.1},
        "epoch-1": EPOCH,
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    for world_size, options in RUNS.items():
        argvs = [run_args(folder / name, text, **changes) for name, changes in options.items()]
        run_on("cpu", world_size, argvs, folder)
    return folder


def test_any_number_of_ranks_gives_the_same_losses(runs: Path) -> None:
    for name in ("unsplit", "2", "3", "changing"):
        for event, key in (("train", "loss"), ("eval", "val_loss")):
            expected = [(row["step"], pytest.approx(row[key], rel=1e-5)) for row in read_rows(runs / "1", event)]
            assert [(row["step"], row[key]) for row in read_rows(runs / name, event)] == expected, name
    assert [row["world_size"] for row in read_rows(runs / "changing")] == [3] * 4 + [2] * 4
    assert loss_curve(runs / "dropout") != loss_curve(runs / "1")  # so the tests of resume have dropout on


def test_the_last_batch_of_the_last_epoch_may_be_short(runs: Path) -> None:
    """167 windows in batches of 80, 80 and 7; on 3 ranks with micro-batches of 30, dummies fill the last step."""
    assert newest_snapshot(runs / "epoch-1")["samples"] == (2700 - 16) // 16 == 167
    losses, others = ([loss for _, loss in loss_curve(runs / name)] for name in ("epoch-1", "epoch-3"))
    assert len(losses) == 3
    assert others == pytest.approx(losses, rel=1e-5)


def test_validation_loss_is_the_mean_over_all_targets_with_the_same_bits_on_any_number_of_ranks(
    text: Path, tmp_path: Path
) -> None:
    argv = run_args(tmp_path / "run", text)
    [(loss, mean)] = run_ranks(1, _validation_loss, *argv, tmp_path=tmp_path)
    assert loss == pytest.approx(mean, rel=1e-6)
    for world_size in (2, 3):
        assert {value for value, _ in run_ranks(world_size, _validation_loss, *argv, tmp_path=tmp_path)} == {loss}


def _validation_loss(*argv: str) -> tuple[float, float]:
    """The validation loss, and the mean over targets of losses that are computed window by window."""
    with open_trainer(*argv) as trainer, torch.no_grad():
        trainer.evaluate()
        loss = trainer.progress.val_loss
        model, losses = trainer.strategy.full_model.eval(), []
        for window in range(len(trainer.val_data)):
            idx, targets = trainer.val_data[range(window, window + 1)]
            logits, _ = model(idx)
            losses += [-logits[0, t].log_softmax(0)[targets[0, t]].item() for t in range(16) if targets[0, t] >= 0]
        assert len(losses) == 299
        return loss, sum(losses) / len(losses)


def test_after_a_kill_the_same_command_ends_in_the_same_bits(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the run can be sampled, and a further start trains nothing."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    options = {"trainer__max_steps": 36, "trainer__eval_every": 18, "trainer__save_every": 4}
    argv = run_args(run_dir, text, **options)
    processes, _ = start_ranks(2, train_main, *argv, tmp_path=tmp_path)
    wait_for_step(run_dir, 8)
    for process in processes:
        process.kill()
        process.join()
    assert read_rows(run_dir)[-1]["step"] < 36

    _, resumed, again = run_on("cpu", 2, [run_args(whole, text, **options), argv, argv], tmp_path)
    assert_same_run(whole, run_dir)
    script, *command = resumed.partition("to sample:  python ")[2].splitlines()[0].split()
    assert Path(script).name == "sample.py"
    assert program.run_program(sample.run, [*command, "--prompt", "anna", "--max_new_tokens", "30"]) == 0
    sampled = capsys.readouterr().out
    assert (sampled[:4], len(sampled)) == ("anna", 34)
    assert "already trained: " in again
    assert len(read_rows(run_dir, "start")) == 2


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_stops_the_run_after_a_save(name: str, status: int, text: Path, tmp_path: Path) -> None:
    run_dir, files = tmp_path / "run", (tmp_path / "stdout", tmp_path / "stderr")
    argv = run_args(run_dir, text, trainer__max_steps=100_000, trainer__save_every=100_000)
    [process], _ = start_ranks(1, main_process, argv, *files, tmp_path=tmp_path)
    wait_for_step(run_dir, 5)
    os.kill(process.pid, getattr(signal, name))
    process.join(60)
    out, err = (file.read_text() for file in files)
    assert (process.exitcode, err) == (status, "")
    [stop], step = read_rows(run_dir, "stop"), newest_snapshot(run_dir)["step"]
    assert stop == {"event": "stop", "step": step, "time": stop["time"], "signal": name}
    assert read_rows(run_dir)[-1]["step"] == step
    assert f"stopped by {name} at step {step} after saving a snapshot; run the same command to resume" in out


def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=100_000, trainer__save_every=100_000)
    assert run_ranks(2, _signal_last_rank_in_step_5, *argv, tmp_path=tmp_path) == [143, 143]
    [stop] = read_rows(tmp_path / "run", "stop")
    assert (stop["signal"], stop["step"]) == ("SIGUSR1", newest_snapshot(tmp_path / "run")["step"])


def _signal_last_rank_in_step_5(*argv: str) -> int:
    def send_signal(trainer: Trainer) -> None:
        if trainer.context.rank == 1 and trainer.progress.step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)

    call_before(Trainer, "train_step", send_signal)
    return train_main(*argv)
