"""What a whole run guarantees: exact resume, the same curve on any number of ranks, stops, and honest exits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_equal_snapshots,
    loss_curve,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_program,
    run_ranks,
    start_main,
    train_main,
    wait_for_step,
    worker_pids,
)

from mingpt.config_parser import read_config
from mingpt.distributed.process_group import init_distributed
from mingpt.evaluation import evaluate
from mingpt.snapshot.storage import load_snapshot
from trainer import Trainer


@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_resume_is_exact(world_size: int, text: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_ranks(world_size, train_main, *run_args(whole, text), tmp_path=tmp_path) == [0] * world_size
    for stop in (5, 12):  # decay_steps: the schedule must not move with max_steps
        argv = run_args(parts, text, trainer__max_steps=stop, optimizer__decay_steps=12)
        assert run_ranks(world_size, train_main, *argv, tmp_path=tmp_path) == [0] * world_size
    assert_equal_snapshots(whole, parts)
    assert loss_curve(whole) == loss_curve(parts)
    assert [step for step, _ in loss_curve(whole)] == list(range(1, 13))


def test_dropout_is_on_in_the_exactness_test(text: Path, tmp_path: Path) -> None:
    """Guards the tests around it: with another seed for dropout alone the curve would differ."""
    run_ranks(1, train_main, *run_args(tmp_path / "on", text), tmp_path=tmp_path)
    run_ranks(1, train_main, *run_args(tmp_path / "off", text, model__dropout=0.0), tmp_path=tmp_path)
    assert loss_curve(tmp_path / "on") != loss_curve(tmp_path / "off")


def test_any_number_of_ranks_gives_the_same_curve(text: Path, tmp_path: Path) -> None:
    curves, val_losses = [], []
    for number, changes in ((1, {}), (1, {"trainer__micro_batch_size": None}), (2, {}), (3, {}), (4, {})):
        run_dir = tmp_path / f"{len(curves)}"
        run_ranks(number, train_main, *run_args(run_dir, text, model__dropout=0.0, **changes), tmp_path=tmp_path)
        curves.append([loss for _, loss in loss_curve(run_dir)])
        val_losses.append([row["val_loss"] for row in read_rows(run_dir, "eval")])
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], rel=1e-5)
    for other in val_losses[1:]:
        assert other == pytest.approx(val_losses[0], rel=1e-5)


def test_the_validation_loss_has_the_same_bits_on_any_number_of_ranks(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text)
    [(loss, mean)] = run_ranks(1, _validation_loss_and_mean, *argv, tmp_path=tmp_path)
    assert loss == pytest.approx(mean, rel=1e-6)
    for number in (2, 3):
        assert set(run_ranks(number, _validation_loss, *argv, tmp_path=tmp_path)) == {loss}


def _validation_loss(*argv: str) -> float:
    config = read_config([*argv, "--distributed.init_method", os.environ["TEST_INIT_METHOD"]])
    with init_distributed(config.distributed) as context:
        made = Trainer(config, context)
        return evaluate(made.state, made.validation)


def _validation_loss_and_mean(*argv: str) -> tuple[float, float]:
    """The same twice, then with each window on its own and every target counted once."""
    config = read_config(argv)
    with init_distributed(config.distributed) as context, torch.no_grad():
        trainer = Trainer(config, context)
        loss = evaluate(trainer.state, trainer.validation)
        model, losses = trainer.state.strategy.whole.eval(), []
        for window in range(len(trainer.validation)):
            idx, targets = trainer.validation[range(window, window + 1)]
            logits, _ = model(idx)
            losses += [-logits[0, t].log_softmax(0)[targets[0, t]].item() for t in range(16) if targets[0, t] >= 0]
        assert len(losses) == 299
        return loss, sum(losses) / len(losses)


@pytest.mark.slow
def test_the_number_of_ranks_may_change_on_the_way(text: Path, tmp_path: Path) -> None:
    knobs = {"model__dropout": 0.0, "optimizer__decay_steps": 12}
    run_ranks(1, train_main, *run_args(tmp_path / "whole", text, **knobs), tmp_path=tmp_path)
    for number, stop in ((4, 3), (3, 6), (1, 9), (2, 12)):
        run_ranks(
            number, train_main, *run_args(tmp_path / "parts", text, trainer__max_steps=stop, **knobs), tmp_path=tmp_path
        )
    one, other = loss_curve(tmp_path / "whole"), loss_curve(tmp_path / "parts")
    assert [loss for _, loss in other] == pytest.approx([loss for _, loss in one], rel=1e-5)
    assert [row["world_size"] for row in read_rows(tmp_path / "parts")] == [4] * 3 + [3] * 3 + [1] * 3 + [2] * 3


def test_the_last_batch_of_the_last_epoch_may_be_short(text: Path, tmp_path: Path) -> None:
    """167 windows in batches of 80: 80 + 80 + 7; with 3 ranks and micro-batches of 30, dummies fill the last step."""
    knobs = {"model__dropout": 0.0, "trainer__max_steps": None, "trainer__max_epochs": 1, "trainer__batch_size": 80}
    for number in (1, 3):
        argv = run_args(tmp_path / str(number), text, trainer__micro_batch_size=30, **knobs)
        run_ranks(number, train_main, *argv, tmp_path=tmp_path)
    assert newest_snapshot(tmp_path / "1")["samples"] == (2700 - 16) // 16 == 167
    one, three = loss_curve(tmp_path / "1"), loss_curve(tmp_path / "3")
    assert [loss for _, loss in three] == pytest.approx([loss for _, loss in one], rel=1e-5)
    assert len(one) == 3


def test_main_job_under_torchrun(text: Path, tmp_path: Path) -> None:
    """Stopped by a signal to torchrun, gone on with, sampled, and found done."""
    run, launcher = tmp_path / "run", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with start_main(
        run_args(run, text, trainer__max_steps=1_000_000, trainer__save_every=1_000_000), *launcher
    ) as agent:
        wait_for_step(run, 5)
        agent.terminate()
        out, _ = agent.communicate(timeout=60)
    for member in ("GLOBAL_RANK: 0, MEMBER: 1/2", "GLOBAL_RANK: 1, MEMBER: 2/2"):
        assert out.count(member) == 1
    [stop] = read_rows(run, "stop")
    assert (stop["signal"], stop["step"]) == ("SIGTERM", newest_snapshot(run)["step"])
    assert read_rows(run)[-1]["step"] == stop["step"]

    argv = run_args(run, text, trainer__max_steps=stop["step"] + 12, trainer__eval_every=1_000_000)
    (status, out, _), (_, silence, _) = run_ranks(2, run_captured, *argv, tmp_path=tmp_path)
    assert (status, silence) == (0, "")
    assert out.count("validation loss") == 2  # an evaluation and the end
    command = out.partition("to sample it:  python ")[2].splitlines()[0].split()
    sampled = run_program(*command, "--prompt", "anna", "--max_new_tokens", "30", "--seed", "2")
    assert sampled.returncode == 0, sampled.stderr
    assert len(sampled.stdout) == 34
    assert sampled.stdout.startswith("anna")

    before = (run / "metrics.jsonl").read_bytes()
    (status, again, _), *_ = run_ranks(2, run_captured, *argv, tmp_path=tmp_path)
    assert status == 0
    assert "already trained" in again
    assert "max_steps" in again
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "status"),
    [("SIGTERM", 143), *(pytest.param(*told, marks=pytest.mark.slow) for told in (("SIGUSR1", 143), ("SIGINT", 130)))],
)
def test_told_to_stop_it_saves_and_says_so(name: str, status: int, text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=100_000, trainer__save_every=100_000)
    with start_main(argv) as process:
        wait_for_step(tmp_path / "run", 5)
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    step = newest_snapshot(tmp_path / "run")["step"]
    assert read_rows(tmp_path / "run", "stop")[-1] | {"time": 0} == {
        "event": "stop",
        "step": step,
        "time": 0,
        "signal": name,
    }
    assert read_rows(tmp_path / "run")[-1]["step"] == step
    assert f"stopped by {name} at step {step}" in out


def test_one_told_rank_stops_all_at_one_step(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=100_000, trainer__save_every=100_000)
    assert run_ranks(3, _last_is_told_in_step_5, *argv, tmp_path=tmp_path) == [143, 143, 143]
    assert read_rows(tmp_path / "run", "stop")[-1]["step"] == newest_snapshot(tmp_path / "run")["step"]


def _last_is_told_in_step_5(*argv: str) -> int:
    step = Trainer.train_step

    def stopped(trainer: Trainer) -> Any:
        if trainer.context.rank == 2 and trainer.state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer)

    Trainer.train_step = stopped  # type: ignore[method-assign]
    return train_main(*argv)


@pytest.mark.parametrize(
    ("world_size", "kills"), [(2, {30: 0}), pytest.param(3, {30: 0, 90: 2}, marks=pytest.mark.slow)]
)
def test_kill_9_of_a_worker_under_torchrun_ends_in_the_same_bits(
    world_size: int, kills: dict[int, int], text: Path, tmp_path: Path
) -> None:
    """One is killed after another: at this step, this rank."""
    argv = {"trainer__max_steps": 70 * len(kills), "trainer__eval_every": 40, "trainer__save_every": 20}
    run_ranks(world_size, train_main, *run_args(tmp_path / "whole", text, **argv), tmp_path=tmp_path)
    killed = tmp_path / "killed"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}", "--max_restarts=3"]
    with start_main(run_args(killed, text, **argv), *launcher) as agent:
        for step, victim in kills.items():
            wait_for_step(killed, step)
            os.kill(worker_pids(agent.pid)[victim], signal.SIGKILL)
        _, err = agent.communicate(timeout=120)
    assert agent.returncode == 0, err
    assert_equal_snapshots(tmp_path / "whole", killed)
    assert loss_curve(tmp_path / "whole") == loss_curve(killed)
    assert {row["restart_count"] for row in read_rows(killed)} == {*range(len(kills) + 1)}


def test_a_loss_that_is_not_finite_stops_before_anything_is_touched(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_ranks(1, train_main, *run_args(run, text, trainer__max_steps=3), tmp_path=tmp_path) == [0]
    good = newest_snapshot(run)
    # A learning rate that overflows float32 within a few steps.
    poisoned = run_args(run, text, trainer__max_steps=30)
    poisoned += ["--optimizer.learning_rate", "1e30", "--optimizer.grad_norm_clip", "null"]
    [(status, _, err)] = run_ranks(1, run_captured, *poisoned, tmp_path=tmp_path)
    assert status == 2
    assert "not finite" in err
    step = int(err.split("step ")[1].split(":")[0])
    assert step == read_rows(run)[-1]["step"] + 1
    assert newest_snapshot(run)["step"] in range(3, step)
    assert all(weight.isfinite().all() for weight in newest_snapshot(run)["model"].values())
    assert torch.equal(
        load_snapshot(str(run / "snapshots/step_00000003.pt"))["model"]["transformer.wte.weight"],
        good["model"]["transformer.wte.weight"],
    )


@pytest.mark.slow
def test_a_run_folder_is_for_one_run_at_a_time(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1_000_000)
    with start_main(argv) as process:
        wait_for_step(tmp_path / "run", 5)
        second = run_program("main.py", *argv)
        assert second.returncode == 2
        assert second.stderr.startswith("error: trainer.run_dir: another process is training in ")
        assert "Traceback" not in second.stderr
        process.kill()  # which frees the folder
        process.wait(60)
    step = read_rows(tmp_path / "run")[-1]["step"]
    assert run_program("main.py", *run_args(tmp_path / "run", text, trainer__max_steps=step + 1)).returncode == 0
