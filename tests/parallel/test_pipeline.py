"""Stages train what one process trains, write its snapshot, and end as other ranks do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    MEMORY_KINDS,
    NO_DROPOUT,
    assert_equal_snapshots,
    loss_curve,
    max_relative_error,
    newest_snapshot,
    open_trainer,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_main,
    train_curves,
    train_losses,
    train_main,
    wait_for_step,
    worker_pids,
)
from stages import COMPANY, FOUR, MESHES, REFUSED, RESUMED, memory_of, on, refusal, resume, save_two_stages

from mingpt.evaluation import evaluate, generate_sample
from trainer import Trainer

# One truth


def test_stages_train_the_curve_of_one_process(text: Path, tmp_path: Path) -> None:
    """Four stages, and two replicas of two with and without FSDP; the slow test has all of it."""
    some = [on(4), on(2), on(2, distributed__strategy="fsdp", distributed__pipeline_schedule="gpipe")]
    [[plain]] = run_ranks(1, train_curves, tmp_path, [FOUR], 4, tmp_path=tmp_path)
    for found in run_ranks(4, train_curves, tmp_path, some, 4, tmp_path=tmp_path):
        for knobs, one in zip(some, found, strict=True):
            assert max_relative_error(one, plain) < 1e-5, knobs


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "stages"), MESHES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_mesh_trains_the_same_long_curve(
    replicas: int, stages: int, schedule: str, text: Path, tmp_path: Path
) -> None:
    [[plain]] = run_ranks(1, train_curves, tmp_path, [FOUR], 20, tmp_path=tmp_path)
    knobs = on(stages, distributed__pipeline_schedule=schedule)
    found, *_ = run_ranks(replicas * stages, train_curves, tmp_path, [knobs], 20, tmp_path=tmp_path)
    assert max_relative_error(found[0], plain) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPANY)
def test_stages_go_with(name: str, text: Path, tmp_path: Path) -> None:
    alone = FOUR | COMPANY[name] | {"trainer__compile": False, "distributed__strategy": "ddp"}
    [[plain]] = run_ranks(1, train_curves, tmp_path, [alone], 20, tmp_path=tmp_path)
    found, *_ = run_ranks(4, train_curves, tmp_path, [on(2, **COMPANY[name])], 20, tmp_path=tmp_path, timeout=300)
    assert max_relative_error(found[0], plain) < (1e-2 if "bf16" in name else 1e-5)


def test_validation_and_samples_are_those_of_one_process(text: Path, tmp_path: Path) -> None:
    [(*one, says)] = run_ranks(1, _looked_at, tmp_path, 1, tmp_path=tmp_path)
    for *found, words in run_ranks(4, _looked_at, tmp_path, 2, tmp_path=tmp_path):
        assert found == pytest.approx(one, rel=1e-6)
        assert words == says


def _looked_at(folder: Path, stages: int) -> tuple[float, float, str]:
    """Validation losses before training, with dropout that must rest, and after it; and a sample."""
    knobs = on(stages, trainer__micro_batch_size=2, distributed__pipeline_schedule="gpipe")
    wet = run_args(folder / f"wet-{stages}", folder / "text.txt", **knobs)
    with open_trainer(*wet, rendezvous="wet") as made:
        before = evaluate(made.state, made.validation)
    with open_trainer(*run_args(folder / f"dry-{stages}", folder / "text.txt", **NO_DROPOUT, **knobs)) as made:
        evaluate(made.state, made.validation)
        train_losses(made, 4)
        return before, evaluate(made.state, made.validation), generate_sample(made.state)


def test_the_last_batch_may_be_short(text: Path, tmp_path: Path) -> None:
    """167 windows in batches of 80, the last of 7: of four micro-batches of 20, one has some and three have none."""
    knobs = {"model__dropout": 0.0, "trainer__max_steps": None, "trainer__max_epochs": 1, "trainer__batch_size": 80}
    for number, stages in ((1, 1), (4, 2)):
        argv = run_args(tmp_path / str(number), text, trainer__micro_batch_size=20, **knobs)
        run_ranks(number, train_main, *argv, f"--distributed.pipeline_stages={stages}", tmp_path=tmp_path)
    one, four = loss_curve(tmp_path / "1"), loss_curve(tmp_path / "4")
    assert [loss for _, loss in four] == pytest.approx([loss for _, loss in one], rel=1e-5)
    assert len(one) == 3


# One snapshot


@pytest.mark.parametrize(
    ("number", "knobs"),
    [
        (2, {}),
        *(
            pytest.param(number, knobs, marks=pytest.mark.slow)
            for number, knobs in (
                (4, {}),
                (6, {"trainer__batch_size": 12}),  # three replicas, in whose sums the order counts
                (4, {"distributed__strategy": "fsdp"}),
                (4, {"distributed__strategy": "zero1", "optimizer__name": "muon"}),
                (4, {"trainer__activation_checkpointing": "full"}),
            )
        ),
    ],
)
def test_resume_is_exact(number: int, knobs: dict[str, Any], text: Path, tmp_path: Path) -> None:
    """With dropout, of which each stage draws its own; what it is compared with is not without."""
    whole, parts, dry = tmp_path / "whole", tmp_path / "parts", tmp_path / "dry"
    for run, stop, more in ((whole, 8, {}), (parts, 5, {}), (parts, 8, {}), (dry, 2, {"model__dropout": 0.0})):
        argv = run_args(run, text, trainer__max_steps=stop, optimizer__decay_steps=12, **on(2, **knobs), **more)
        assert run_ranks(number, train_main, *argv, tmp_path=tmp_path) == [0] * number
    assert_equal_snapshots(whole, parts)
    assert loss_curve(whole) == loss_curve(parts)
    assert loss_curve(dry)[0] != loss_curve(whole)[0]


def test_each_stage_draws_dropout_of_its_own(text: Path, tmp_path: Path) -> None:
    found = run_ranks(4, _seeds, tmp_path, tmp_path=tmp_path)
    assert found[0] == found[2] != found[1] == found[3]
    assert len({*found[0], *found[1]}) == 6


def _seeds(folder: Path) -> list[int]:
    with open_trainer(*run_args(folder / "run", folder / "text.txt", **on(2))) as made:
        return [made.state.strategy.seed(first) for first in range(3)]


def test_tied_embeddings_stay_equal_to_the_last_bit(text: Path, tmp_path: Path) -> None:
    """On the first and the last of three stages, in both replicas, weights and optimizer state."""
    found = run_ranks(6, _embeddings, tmp_path, tmp_path=tmp_path)
    held = [tensors for tensors in found if tensors]
    assert len(held) == 4
    for tensors in held[1:]:
        for one, other in zip(held[0], tensors, strict=True):
            assert np.array_equal(one, other)
    assert len(held[0]) == 3


def _embeddings(folder: Path) -> list[np.ndarray]:
    knobs = on(3, optimizer__name="muon")  # AdamW moves embeddings all the same
    with open_trainer(*run_args(folder / "run", folder / "text.txt", **knobs)) as made:
        train_losses(made, 5)
        strategy = made.state.strategy
        wte = strategy.parameters.get("transformer.wte.weight")
        if wte is None:
            return []
        state = strategy.stepper.state[wte]
        return [tensor.detach().numpy() for tensor in (wte, state["exp_avg"], state["exp_avg_sq"])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with text.txt and a run of 6 steps on two stages, and one process's losses of the steps that follow."""
    from helpers import write_text

    folder = tmp_path_factory.mktemp("saved")
    write_text(folder / "text.txt")
    return folder, save_two_stages(folder)


@pytest.mark.parametrize(
    "name", ["1 process", *(pytest.param(name, marks=pytest.mark.slow) for name in RESUMED if name != "1 process")]
)
def test_what_two_stages_saved_others_resume(name: str, saved: tuple[Path, list[float]]) -> None:
    folder, plain = saved
    replicas, stages, _ = RESUMED[name]
    for same_bits, after in run_ranks(replicas * stages, resume, folder, name, tmp_path=folder):
        assert same_bits
        assert max_relative_error(after, plain) < 1e-5


# Memory


@pytest.mark.slow
def test_what_a_rank_holds_falls_as_the_number_of_stages(text: Path, tmp_path: Path) -> None:
    blocks = {}
    for stages in (1, 2, 4):
        formula, held, embeddings = run_ranks(stages, memory_of, tmp_path, stages, tmp_path=tmp_path)[0]
        blocks[stages] = max(part.total - rest for part, rest in zip(held, embeddings, strict=True))
        most = max(held, key=lambda part: part.total)
        for kind in MEMORY_KINDS:
            assert getattr(most, kind) == pytest.approx(getattr(formula, kind), rel=0.01), (stages, kind)
    assert blocks[2] == pytest.approx(blocks[1] / 2, rel=0.1)
    assert blocks[4] == pytest.approx(blocks[1] / 4, rel=0.1)


def test_memory_that_runs_out_on_a_stage_is_one_message(text: Path, tmp_path: Path) -> None:
    """The library reports what its forward and backward passes raise, and here it counts what that was."""
    for when in ("forward", "backward"):
        argv = run_args(tmp_path / when, text, **on(2))
        (other, _, heard), (status, _, err) = run_ranks(2, _short_of_memory, when, argv, tmp_path=tmp_path)
        assert status == 2
        assert err.startswith("error: out of memory in training: CUDA out of memory"), when
        assert other == 1
        assert "rank 1 (" in heard


def _short_of_memory(when: str, argv: list[str]) -> tuple[int, str, str]:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def first_step(self: Trainer, step: Any = Trainer.train_step) -> Any:
        block = self.state.strategy.whole.blocks[0]
        if self.context.rank == 1 and when == "forward":
            block.register_forward_hook(fail)
        elif self.context.rank == 1:
            block.register_full_backward_hook(fail)
        return step(self)

    Trainer.train_step = first_step  # type: ignore[method-assign]
    return run_captured(*argv)


# All or none


def test_all_stages_skip_a_step_that_overflows_on_one(text: Path, tmp_path: Path) -> None:
    """As fp16 does on GPUs, with the scaler of the CPU."""
    for scales, moved in run_ranks(4, _overflow, tmp_path, tmp_path=tmp_path):
        assert scales == [1024.0, 512.0, 512.0]
        assert moved == [True, False, True]


def _overflow(folder: Path) -> tuple[list[float], list[bool]]:
    scales, moved = [], []
    with open_trainer(*run_args(folder / "run", folder / "text.txt", **on(2))) as made:
        strategy = made.state.strategy
        strategy.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            before = [parameter.detach().clone() for parameter in strategy.parameters.values()]
            if step == 1 and made.context.rank == 2:  # the first stage, which no loss is on
                hook = strategy.parameters["transformer.wpe.weight"].register_hook(lambda grad: grad * float("inf"))
            made.train_step()
            if step == 1 and made.context.rank == 2:
                hook.remove()
            moved.append(not all(map(torch.equal, before, strategy.parameters.values())))
            scales.append(strategy.scaler.get_scale())
    return scales, moved


# Ends

TIMEOUT = 4


@contextmanager
def three(run_dir: Path, text: Path, tmp_path: Path) -> Iterator[list[Popen]]:
    """Three stages of an endless run, started by hand, that have come to step 5."""
    argv = run_args(
        run_dir,
        text,
        trainer__max_steps=1_000_000,
        distributed__init_method=f"file://{tmp_path}/meeting",
        distributed__timeout_seconds=TIMEOUT,
        **on(3),
    )
    with ExitStack() as stack:
        processes = [stack.enter_context(start_main(argv, RANK=str(rank), WORLD_SIZE="3")) for rank in range(3)]
        try:
            wait_for_step(run_dir, 5)
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()  # one that is stopped would not hear of SIGTERM


@pytest.mark.slow
def test_kill_9_of_a_stage_under_torchrun_ends_in_the_same_bits(text: Path, tmp_path: Path) -> None:
    knobs = on(2, trainer__max_steps=160, trainer__eval_every=40, trainer__save_every=20)
    run_ranks(4, train_main, *run_args(tmp_path / "whole", text, **knobs), tmp_path=tmp_path)
    killed = tmp_path / "killed"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "--max_restarts=3"]
    with start_main(run_args(killed, text, **knobs), *launcher) as agent:
        for victim, step in ((0, 30), (3, 90)):
            wait_for_step(killed, step)
            os.kill(worker_pids(agent.pid)[victim], signal.SIGKILL)
        _, err = agent.communicate(timeout=120)
    assert agent.returncode == 0, err
    assert_equal_snapshots(tmp_path / "whole", killed)
    assert loss_curve(tmp_path / "whole") == loss_curve(killed)
    assert {row["restart_count"] for row in read_rows(killed)} == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL", "SIGTERM"])
def test_a_stage_that_is_gone_is_named_and_one_that_is_told_to_stop_saves(
    how: str, victim: int, text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with three(run, text, tmp_path) as processes:
        began = time.monotonic()
        processes[victim].send_signal(getattr(signal, how))
        if how == "SIGTERM":
            assert [process.wait(60) for process in processes] == [143] * 3
            assert newest_snapshot(run)["step"] == read_rows(run, "stop")[-1]["step"] >= 5
            return
        for rank, process in enumerate(processes):
            if rank != victim:
                _, err = process.communicate(timeout=60)
                assert process.returncode == 1
                assert time.monotonic() - began < TIMEOUT + 6
                assert "Traceback" not in err
                assert err.count("error: ") == 1, err
                assert f"rank {victim}" in err


# Bad input


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_do_not_go_with_is_refused(name: str, tmp_path: Path) -> None:
    key, _, value = name.partition(": ")
    assert f"distributed.{key} is {value}, must be" in refusal(tmp_path, REFUSED[name]).replace("True", "true")


@pytest.mark.parametrize(
    ("number", "knobs", "words"),
    [
        (1, on(5), "distributed.pipeline_stages is 5, must be at most model.n_layer, 4"),
        (1, on(0), "distributed.pipeline_stages is 0, must be at least 1"),
        (1, on(2, trainer__micro_batch_size=None), "trainer.micro_batch_size is null, must be a number"),
        (1, on(2), "distributed.pipeline_stages is 2, of which 1 processes are no multiple: start 2"),
        (3, on(2), "distributed.pipeline_stages is 2, of which 3 processes are no multiple: start 4"),
        (2, on(2, trainer__micro_batch_size=3), "trainer.batch_size is 8, must be a multiple of 3"),
        (2, on(2, trainer__micro_batch_size=8), "1 micro-batches for 2 stages, which would wait 50% of the time"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_message(
    number: int, knobs: dict[str, Any], words: str, tmp_path: Path
) -> None:
    argv = run_args(tmp_path / "run", tmp_path / "text.txt", **knobs)  # a text that nobody comes to read
    found = run_ranks(number, run_captured, *argv, tmp_path=tmp_path)
    assert [status for status, _, _ in found] == [2] * number
    said = "".join(err for _, _, err in found)
    assert said.count("error: ") == 1
    assert words in said


def test_fewer_micro_batches_than_stages_are_told_of(text: Path, tmp_path: Path) -> None:
    knobs = on(2, trainer__micro_batch_size=8, distributed__pipeline_schedule="gpipe", trainer__max_steps=1)
    (status, out, _), *_ = run_ranks(2, run_captured, *run_args(tmp_path / "run", text, **knobs), tmp_path=tmp_path)
    assert status == 0
    assert "replicas x stages: 1 x 2, gpipe, 1 micro-batches of 8: each stage waits 50% of the time" in out
