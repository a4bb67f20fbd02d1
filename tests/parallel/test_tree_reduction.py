"""Tree reduction gives the same bits for any number of ranks."""

from pathlib import Path

import pytest

from tests.faults.runs import assert_same_run
from tests.helpers import DEVICES, loss_curve, ranks_on, read_rows, run_args, run_on, write_text
from tests.inside import newest_snapshot

TREE = {"distributed__reduction": "tree"}
# Runs on one and on three ranks.
RUNS = {
    "bf16": {"trainer__precision": "bf16", **TREE},
    "muon": {"optimizer__name": "muon", "trainer__micro_batch_size": 1, **TREE},
    # 167 windows make batches of 83, 83 and 1. In the last step, two of three ranks do not have a micro-batch.
    "short": {
        "trainer__max_steps": None,
        "trainer__max_epochs": 1,
        "trainer__batch_size": 83,
        "trainer__micro_batch_size": 20,
        **TREE,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs such as bf16-3, the run `bf16` on three ranks."""
    folder = tmp_path_factory.mktemp("tree")
    text = write_text(folder / "text.txt")
    for ranks in (1, 3):
        argvs = [run_args(folder / f"{name}-{ranks}", text, **options) for name, options in RUNS.items()]
        run_on("cpu", ranks, argvs, folder)
    return folder


@pytest.mark.parametrize("device", DEVICES)
def test_the_tree_gives_the_same_bits_when_the_number_of_ranks_changes(device: str, text: Path, tmp_path: Path) -> None:
    """With dropout, accumulation, and one sequence instead of two in the last micro-batch."""
    most = ranks_on(device, 4, at_least=2)
    one, changing = tmp_path / "one", tmp_path / "changing"
    world_sizes = []
    for run_dir, ranks, stop in ((one, 1, 12), (changing, 4, 3), (changing, 3, 6), (changing, 1, 9), (changing, 2, 12)):
        options = {"trainer__max_steps": stop, "optimizer__decay_steps": 12, "trainer__deterministic": True, **TREE}
        run_on(device, min(ranks, most), [run_args(run_dir, text, **options)], tmp_path)
        world_sizes += [min(ranks, most)] * 3
    assert_same_run(one, changing)
    assert newest_snapshot(one)["best"] == newest_snapshot(changing)["best"]
    assert [row["world_size"] for row in read_rows(changing)] == world_sizes[3:]


@pytest.mark.parametrize("name", RUNS)
def test_the_tree_gives_the_same_bits(name: str, folder: Path) -> None:
    assert_same_run(folder / f"{name}-1", folder / f"{name}-3")
    assert len(loss_curve(folder / f"{name}-1")) == (3 if name == "short" else 12)
