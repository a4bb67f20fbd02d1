"""Pipeline stages have the losses and snapshots of one process, and fail and stop like other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.parallel.evaluation import generate_sample
from mingpt.parallel.pipeline import WTE
from tests.helpers import (
    NO_DROPOUT,
    call_before,
    max_relative_error,
    open_trainer,
    run_args,
    run_captured,
    run_ranks,
    train_losses,
    write_text,
)
from tests.parallel.runs import (
    PIPELINE,
    STRATEGIES,
    Options,
    assert_exact_resume,
    loss_errors,
    resume,
    train,
    with_stages,
)
from trainer import Trainer

SCHEDULED: list[Options] = [
    with_stages(
        stages,
        optimizer__name="muon" if stages == 4 else "adamw",
        distributed__pipeline_schedule=schedule,
    )
    for stages in (2, 4)
    for schedule in ("1f1b", "gpipe")
]
COMBINED: list[Options] = [
    with_stages(2, distributed__strategy="zero1", optimizer__name="muon"),
    with_stages(2, distributed__strategy="zero2", trainer__activation_checkpointing="selective"),
    with_stages(2, distributed__strategy="fsdp", trainer__activation_checkpointing="full"),
    with_stages(2, distributed__strategy="fsdp", trainer__compile=True),
    with_stages(2, trainer__precision="bf16"),
]
# In the default model, the middle stage has only the matrices of blocks, so it does not have any parameters for AdamW.
MIDDLE_STAGE = [with_stages(3, distributed__strategy=name, optimizer__name="muon") for name in STRATEGIES]


@pytest.mark.parametrize(
    ("ranks", "runs", "steps"),
    [
        (4, SCHEDULED[1:3], 4),
        pytest.param(4, SCHEDULED + COMBINED, 6, marks=pytest.mark.slow),
        pytest.param(3, MIDDLE_STAGE, 6, marks=pytest.mark.slow),
    ],
)
def test_stages_train_with_the_losses_of_one_process(
    ranks: int, runs: list[Options], steps: int, tmp_path: Path
) -> None:
    for options, error in zip(runs, loss_errors(tmp_path, ranks, runs, steps), strict=True):
        assert error < (1e-2 if "trainer__precision" in options else 1e-5), options


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Results of `_results` on one rank without stages, and on two replicas of two stages."""
    folder = tmp_path_factory.mktemp("results")
    write_text(folder / "text.txt")
    return {n: run_ranks(n, _results, folder, stages, tmp_path=folder) for n, stages in ((1, 1), (4, 2))}


def _results(folder: Path, stages: int) -> dict[str, Any]:
    options = with_stages(stages, trainer__micro_batch_size=2, distributed__pipeline_schedule="gpipe")
    tied = options | {"optimizer__name": "muon"}
    results: dict[str, Any] = {}
    with open_trainer(*run_args(folder / f"run-{stages}", folder / "text.txt", **(NO_DROPOUT | options))) as trainer:
        train_losses(trainer, 4)
        trainer.evaluate()
        results["val_loss"] = trainer.progress.val_loss
        prompt = trainer.corpus.tokenizer.encode("bob", "prompt").tolist()
        results["sample"] = generate_sample(trainer.strategy, prompt, seed=1)
    with open_trainer(*run_args(folder / f"tied-{stages}", folder / "text.txt", **tied), rendezvous="tied") as trainer:
        trainer.evaluate()
        results["val_loss_with_dropout"] = trainer.progress.val_loss
        seeds: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mingpt.parallel.strategy.seed_generators", lambda _, seed: seeds.append(seed))
            trainer.train_step()
        train_losses(trainer, 4)
        if stages > 1:
            strategy = trainer.strategy
            name = f"{WTE}.weight"
            wte = {"": strategy.parameters[name].detach(), **strategy.local_state[name]}
            results["wte"] = {key: tensor.tolist() for key, tensor in wte.items()}
            results["seeds"] = seeds
    return results


@pytest.mark.parametrize("name", ["val_loss", "val_loss_with_dropout", "sample"])
def test_validation_losses_and_samples_are_those_of_one_process(
    name: str, results: dict[int, list[dict[str, Any]]]
) -> None:
    """Evaluation turns dropout off."""
    [expected] = results[1]
    for found in results[4]:
        assert found[name] == (expected[name] if name == "sample" else pytest.approx(expected[name], rel=1e-6))


def test_each_stage_has_its_own_dropout(results: dict[int, list[dict[str, Any]]]) -> None:
    """A separate seed for each of the two micro-batches of each replica. They read with the same seeds."""
    for first, last in (results[4][:2], results[4][2:]):
        assert first["seeds"][:2] == last["seeds"][:2]
    assert len({found["seeds"][-1] for found in results[4]}) == 1  # for the update
    seeds = [seed for found in results[4] for seed in found["seeds"][2:-1]]
    assert len(set(seeds)) == len(seeds) == 8


def test_tied_embeddings_have_the_same_bits_in_the_first_and_last_stage(
    results: dict[int, list[dict[str, Any]]],
) -> None:
    """Their weights and their optimizer state (with Muon, AdamW trains embeddings), in both replicas."""
    for found in results[4]:
        assert found["wte"] == results[4][0]["wte"]
        assert found["wte"].keys() == {"", "step", "exp_avg", "exp_avg_sq"}


def test_the_last_batch_may_be_short(tmp_path: Path) -> None:
    """167 windows make batches of 80, 80 and 7. Of the last batch's four micro-batches of 20, three are empty."""
    epoch: Options = {"trainer__max_steps": None, "trainer__max_epochs": 1, "trainer__batch_size": 80}
    runs = {stages: with_stages(stages, **epoch | {"trainer__micro_batch_size": 20}) for stages in (1, 2)}
    [one] = train(tmp_path, 1, {"one": runs[1]}, 99).values()
    [four] = train(tmp_path, 4, {"four": runs[2]}, 99).values()
    assert four == pytest.approx(one, rel=1e-5)
    assert len(one) == 3


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (2, {"stages": {}}),
        pytest.param(
            4,
            {
                "fsdp": {"distributed__strategy": "fsdp", "trainer__activation_checkpointing": "full"},
                "zero1": {"distributed__strategy": "zero1", "optimizer__name": "muon"},
            },
            marks=pytest.mark.slow,
        ),
        # With three replicas, the order of additions matters.
        pytest.param(6, {"replicas": {"trainer__batch_size": 12}}, marks=pytest.mark.slow),
    ],
)
def test_resume_is_exact(ranks: int, runs: dict[str, dict], tmp_path: Path) -> None:
    """With dropout."""
    options = {name: with_stages(2, **changes) for name, changes in runs.items()}
    assert_exact_resume(tmp_path, ranks, options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with a run of six steps with two stages, and the losses of the next steps in one process."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder, 2, {"stages": with_stages(2)}, 6)
    return folder, train(folder, 1, {"uninterrupted": PIPELINE}, 9)["uninterrupted"][6:]


@pytest.mark.parametrize(
    ("ranks", "stages", "strategy"),
    [
        (1, 1, "ddp"),
        *(pytest.param(*run, marks=pytest.mark.slow) for run in ((4, 4, "ddp"), (4, 2, "fsdp"), (2, 1, "fsdp"))),
    ],
)
def test_what_two_stages_saved_is_resumed(
    ranks: int, stages: int, strategy: str, saved: tuple[Path, list[float]]
) -> None:
    folder, expected = saved
    runs = [("stages", with_stages(stages, distributed__strategy=strategy))]
    for [(is_equal, losses)] in run_ranks(ranks, resume, folder, runs, tmp_path=folder):
        assert is_equal
        assert max_relative_error(losses, expected) < 1e-5


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_that_runs_out_of_memory_is_one_message(when: str, text: Path, tmp_path: Path) -> None:
    """The pipelining library wraps errors of forward and backward passes."""
    argv = run_args(tmp_path / "run", text, **with_stages(2))
    (other, _, other_err), (status, _, err) = run_ranks(2, _run_out_of_memory, when, argv, tmp_path=tmp_path)
    assert status == 2
    assert err.startswith("error: out of memory: ")
    assert "PyTorch's message: CUDA out of memory" in err
    assert other == 1
    assert "rank 1 failed: " in other_err


def _run_out_of_memory(when: str, argv: list[str]) -> tuple[int, str, str]:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def fail_in_block(trainer: Trainer) -> None:
        if trainer.context.rank == 1:
            block = trainer.strategy.full_model.stage_model.blocks[2]
            register = block.register_forward_hook if when == "forward" else block.register_full_backward_hook
            register(fail)

    call_before(Trainer, "train_step", fail_in_block)
    return run_captured(*argv)
