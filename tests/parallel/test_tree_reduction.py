"""How gradients become one: the tree gives the same bits at any number of ranks; both ways agree to rounding error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import (
    assert_equal_snapshots,
    loss_curve,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    train_main,
)
from torch import Tensor

from mingpt.config import DistributedConfig
from mingpt.config_parser import read_config
from mingpt.distributed.process_group import init_distributed
from mingpt.parallel.tree_reduction import TreeReduction, subtree_ranges

TREE = {"distributed__reduction": "tree"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and an undisturbed run with the tree on one rank: run/."""
    from helpers import write_text

    folder = tmp_path_factory.mktemp("whole")
    argv = run_args(folder / "run", write_text(folder / "text.txt"), **TREE)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    return folder


@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_tree_gives_the_same_bits_at_any_number_of_ranks(number: int, whole: Path, tmp_path: Path) -> None:
    """With dropout, accumulation and a last micro-batch of one sequence instead of two."""
    argv = run_args(tmp_path / "run", whole / "text.txt", **TREE)
    assert run_ranks(number, train_main, *argv, tmp_path=tmp_path) == [0] * number
    assert_equal_snapshots(whole / "run", tmp_path / "run")
    assert loss_curve(whole / "run") == loss_curve(tmp_path / "run")
    assert newest_snapshot(whole / "run")["best"] == newest_snapshot(tmp_path / "run")["best"]


def test_the_tree_gives_the_same_bits_when_the_number_of_ranks_changes_on_the_way(whole: Path, tmp_path: Path) -> None:
    for number, stop in ((4, 3), (3, 6), (1, 9), (2, 12)):
        argv = run_args(
            tmp_path / "run", whole / "text.txt", trainer__max_steps=stop, optimizer__decay_steps=12, **TREE
        )
        assert run_ranks(number, train_main, *argv, tmp_path=tmp_path) == [0] * number
    assert_equal_snapshots(whole / "run", tmp_path / "run")
    assert loss_curve(whole / "run") == loss_curve(tmp_path / "run")
    assert [row["world_size"] for row in read_rows(tmp_path / "run")] == [4] * 3 + [3] * 3 + [1] * 3 + [2] * 3


@pytest.mark.parametrize(
    "knobs", [{"trainer__precision": "bf16"}, pytest.param({"optimizer__name": "muon"}, marks=pytest.mark.slow)]
)
def test_the_tree_gives_the_same_bits_in_bf16_and_with_muon(knobs: dict, text: Path, tmp_path: Path) -> None:
    for number in (1, 3):
        argv = run_args(tmp_path / str(number), text, **knobs, **TREE)
        assert run_ranks(number, train_main, *argv, tmp_path=tmp_path) == [0] * number
    assert_equal_snapshots(tmp_path / "1", tmp_path / "3")


def test_fast_gives_other_bits_at_another_number_of_ranks(text: Path, tmp_path: Path) -> None:
    """Guards the tests above: without the tree, and with no dropout in the way, the last bits do differ."""
    for number in (1, 3):
        argv = run_args(tmp_path / str(number), text, model__dropout=0.0)
        run_ranks(number, train_main, *argv, tmp_path=tmp_path)
    one, three = (newest_snapshot(tmp_path / name)["model"]["transformer.wte.weight"] for name in ("1", "3"))
    assert not torch.equal(one, three)
    assert torch.allclose(one, three, atol=1e-4)


def test_tree_and_fast_agree_to_rounding_error(text: Path, whole: Path, tmp_path: Path) -> None:
    assert run_ranks(1, train_main, *run_args(tmp_path / "run", text), tmp_path=tmp_path) == [0]
    assert [loss for _, loss in loss_curve(tmp_path / "run")] == pytest.approx(
        [loss for _, loss in loss_curve(whole / "run")], rel=1e-5
    )


@pytest.mark.parametrize("number", [1, 3, 5])
def test_sums_are_those_of_one_tree(number: int, tmp_path: Path) -> None:
    """Up to nine leaves and any parameter shapes, on more ranks than leaves too, against the tree's definition."""
    for results in zip(*run_ranks(number, _sums, tmp_path=tmp_path), strict=True):
        for leaves, gradient in results:
            assert torch.equal(torch.tensor(gradient), _node(list(torch.tensor(leaves)))), (number, len(leaves))


def _sums() -> list[tuple[list, list]]:
    config = DistributedConfig(init_method=os.environ["TEST_INIT_METHOD"], timeout_seconds=60)
    found = []
    with init_distributed(config) as context:
        model = torch.nn.ParameterList([torch.zeros(3, 2), torch.zeros(1), torch.zeros(4)])
        tree = TreeReduction(
            model, context, read_config(["--optimizer.name=adamw", "--trainer.micro_batch_size=1"]), "fp32"
        )
        for count in range(1, 10):
            leaves = torch.randn(count, 11, generator=torch.Generator().manual_seed(count)) * 1e3
            for numbers, _ in tree.micro_batches(range(40, 40 + count)):
                with tree.micro_batch(last=False):
                    for parameter, part in zip(model, leaves[numbers.start - 40].split([6, 1, 4]), strict=True):
                        parameter.grad = part.view_as(parameter).clone()
            tree.finish()
            found.append((leaves.tolist(), torch.cat([parameter.grad.flatten() for parameter in model]).tolist()))
    return found


def _node(leaves: list[Tensor]) -> Tensor:
    """A node's sum: its left half is the largest power of two below the number of its leaves."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return _node(leaves[:half]) + _node(leaves[half:])


def test_a_rank_sends_the_few_whole_subtrees_that_it_holds() -> None:
    assert subtree_ranges(range(0, 8), 16) == [range(0, 8)]
    assert subtree_ranges(range(3, 8), 16) == [range(3, 4), range(4, 8)]
    assert subtree_ranges(range(4, 7), 7) == [range(4, 7)]  # the tree's right edge, where halves are short
    assert subtree_ranges(range(2, 2), 7) == []
    assert len(subtree_ranges(range(1, 1023), 1024)) == 18


def test_more_ranks_than_micro_batches_are_refused(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__micro_batch_size=4, **TREE)
    (status, _, err), *_ = run_ranks(3, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert "trainer.batch_size / trainer.micro_batch_size is 7 / 4" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [1, 3])
def test_a_short_last_batch_may_have_fewer_micro_batches_than_there_are_ranks(
    number: int, text: Path, tmp_path: Path
) -> None:
    """167 windows in batches of 83 leave one for the last step: ranks 0 and 1 of 3 then have none."""
    knobs = {"trainer__max_steps": None, "trainer__max_epochs": 1, "trainer__batch_size": 83} | TREE
    for name, size in (("run", number), ("one", 1)):
        argv = run_args(tmp_path / name, text, trainer__micro_batch_size=20, **knobs)
        assert run_ranks(size, train_main, *argv, tmp_path=tmp_path) == [0] * size
    assert len(loss_curve(tmp_path / "run")) == 3
    assert_equal_snapshots(tmp_path / "one", tmp_path / "run")
