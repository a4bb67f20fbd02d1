"""Steps whose gradients are computed twice: wrong numbers are found and attributed, and bits stay the same."""

import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt.run.replay import CHUNK, digest
from model import Block
from tests.helpers import (
    NO_DROPOUT,
    assert_equal_snapshots,
    assert_one_message,
    loss_curve,
    newest_snapshot,
    open_trainer,
    run_args,
    run_ranks,
)
from tests.parallel.runs import Options, change_buffers, run_changed, with_stages
from trainer import Trainer

ACCUMULATING: Options = {"trainer__batch_size": 8, "trainer__micro_batch_size": 2}
FSDP: Options = ACCUMULATING | {"distributed__strategy": "fsdp"}
TREE: Options = ACCUMULATING | {"distributed__reduction": "tree", "optimizer__name": "adamw"}
EXCHANGED = "; unless it is the loss, another rank may be wrong, since sharded gradients were exchanged"


def named(rank: int, first: str = r"[\w.]+") -> str:
    return rf"rank {rank} \([^)]+, cpu\) in \d+ of \d+ tensors, such as {first}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_depends_on_all_bits_and_their_places(dtype: torch.dtype) -> None:
    x = torch.randn(2, CHUNK // 2 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [x.flip(0), x.flip(1), -x]
    for places in ([0], [-1], [0, 5], [3, CHUNK + 3]):
        changed = x.flatten().clone()
        changed[places] *= -1  # the same bit in each
        others.append(changed)
    digests = [digest(tensor).item() for tensor in (x, *others)]
    assert len(set(digests)) == len(digests)
    assert digest(x.clone()) == digest(x.T.contiguous().T) == digests[0]
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


def compute_wrong_once(in_forward: bool) -> None:
    """The last rank's first pass of step 4 has one wrong number, in an activation or in its gradient."""
    compute_gradients = Trainer.compute_gradients
    forward = Block.forward
    armed: list[bool] = []

    def arming(self: Trainer, batch: range) -> Any:
        if self.progress.step == 3 and self.context.rank == self.context.world_size - 1 and not armed:
            armed.append(True)
        return compute_gradients(self, batch)

    def wrong(self: Any, *args: Any) -> Tensor:
        output = forward(self, *args)
        if armed == [True] and torch.is_grad_enabled():
            armed.append(False)
            error = torch.zeros_like(output)
            error[-1, -1, -1] = 0.01
            if in_forward:
                return output + error
            output.register_hook(lambda gradient: gradient + error)
        return output

    Trainer.compute_gradients = arming  # type: ignore[method-assign]
    Block.forward = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("in_forward", "ranks", "options", "cause"),
    [
        (False, 1, ACCUMULATING, named(0)),
        (False, 2, ACCUMULATING, named(1)),
        (False, 2, TREE, named(1)),
        (False, 2, with_stages(2), f"{named(0)}; {named(1)}"),  # stage 1 sends gradients to stage 0
        (False, 2, FSDP, f"(?:{named(0)}|{named(1)}|{named(0)}; {named(1)}){EXCHANGED}"),
        (True, 2, FSDP, f"(?:{named(0)}; )?{named(1, 'loss')}{EXCHANGED}"),
    ],
)
def test_a_rank_that_computes_wrong_is_named_and_the_same_command_resumes(
    in_forward: bool, ranks: int, options: Options, cause: str, text: Path, tmp_path: Path
) -> None:
    options = NO_DROPOUT | options | {"trainer__replay_every": 3, "trainer__max_steps": 6, "trainer__save_every": 3}
    argvs = [run_args(tmp_path / name, text, **options) for name in ("wrong", "wrong", "right")]
    wrong = partial(compute_wrong_once, in_forward)
    for rank, results in enumerate(run_ranks(ranks, run_changed, wrong, argvs, tmp_path=tmp_path)):
        (status, _, err), *others = results
        assert [status, *(status for status, _, _ in others)] == [2, 0, 0], results
        if rank == 0:
            assert_one_message(err)
            assert re.match(rf"error: step 4, computed twice, had other bits on {cause}\. The hardware", err), err
    assert_equal_snapshots(tmp_path / "wrong", tmp_path / "right")
    assert loss_curve(tmp_path / "wrong") == loss_curve(tmp_path / "right")


@pytest.mark.parametrize("ranks", [1, 2])
def test_computing_twice_changes_no_bit(ranks: int, text: Path, tmp_path: Path) -> None:
    """With dropout, and with buffers that each pass changes."""
    plain: Options = {"trainer__activation_checkpointing": "none", "trainer__max_steps": 4}
    runs = [ACCUMULATING, FSDP, TREE] if ranks == 1 else [ACCUMULATING, FSDP, TREE, with_stages(2)]
    argvs = [
        run_args(tmp_path / f"{i}-{every}", text, **options | plain, trainer__replay_every=every)
        for (i, options), every in product(enumerate(runs), (1, None))
    ]
    for results in run_ranks(ranks, run_changed, partial(change_buffers, is_new=True), argvs, tmp_path=tmp_path):
        assert [status for status, _, _ in results] == [0] * len(argvs), results
    for i, _ in enumerate(runs):
        assert_equal_snapshots(tmp_path / f"{i}-1", tmp_path / f"{i}-None")
        assert newest_snapshot(tmp_path / f"{i}-1")["model"]["transformer.h.0.mlp.count"] > 0


def _count(argv: list[str]) -> list[int]:
    """Returns how often each step of two starts computes gradients."""
    counts: list[int] = []
    with open_trainer(*argv) as trainer:
        compute = trainer.compute_gradients

        def counted(batch: range) -> Any:
            counts[-1] += 1
            return compute(batch)

        trainer.compute_gradients = counted  # type: ignore[method-assign]
        for _ in range(5):
            counts.append(0)
            trainer.train_step()
        trainer.context.device = torch.device("cuda")
        assert not trainer.is_replay_due()  # without trainer.deterministic
    return counts


def test_the_first_step_of_a_start_and_each_nth_after_it_are_computed_twice(text: Path, tmp_path: Path) -> None:
    for every, expected in ((2, [2, 1, 2, 1, 2]), (1000, [2, 1, 1, 1, 1]), (None, [1] * 5)):
        argv = run_args(tmp_path / f"{every}", text, trainer__replay_every=every)
        assert run_ranks(1, partial(_count, argv), tmp_path=tmp_path) == [expected]
