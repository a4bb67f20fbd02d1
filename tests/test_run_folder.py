"""Run folders that are moved or copied."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import read_rows, run_captured, run_ranks, train_run
from tests.inside import list_snapshots, newest_snapshot


@pytest.fixture
def trained(text: Path, tmp_path: Path) -> Path:
    """The folder of a run of 6 steps whose yaml has all options."""
    (tmp_path / "runs").mkdir()
    return train_run(tmp_path / "runs/X", text, trainer__max_steps=6, trainer__eval_every=100)


def start(folder: Path, *options: str) -> tuple[int, str, str]:
    """Starts main.py with the config.yaml of a run folder."""
    argv = ["--config", f"{folder}/config.yaml", *options]
    [result] = run_ranks(1, run_captured, *argv, tmp_path=folder.parents[1])
    return result


def test_the_folder_of_a_runs_config_is_its_run_folder(trained: Path, tmp_path: Path) -> None:
    """After a move. A copy branches the run, whose own files stay as they are."""
    moved = trained.rename(trained.with_name("moved"))
    status, out, err = start(moved, "--trainer.max_steps", "8")
    assert (status, err) == (0, "")
    assert f"resuming from {moved}/snapshots/step_00000006.pt" in out
    assert not trained.exists()

    before = {file: file.read_bytes() for file in moved.rglob("*") if file.is_file() and file.name != ".lock"}
    copy = shutil.copytree(moved, moved.with_name("copy"))
    status, out, err = start(copy, "--trainer.max_steps", "10", "--optimizer.learning_rate", "2e-3")
    assert (status, err) == (0, "")
    assert f"resuming from {copy}/snapshots/step_00000008.pt" in out
    assert newest_snapshot(copy)["step"] == 10
    assert {file: file.read_bytes() for file in before} == before
    [*_, row] = read_rows(copy, "start")
    assert row["changed"] == ["optimizer.learning_rate 0.005 -> 0.002", "trainer.max_steps 8 -> 10"]

    other = tmp_path / "runs/other"
    status, out, _ = start(copy, "--trainer.run_dir", str(other), "--trainer.max_steps", "1")
    assert status == 0
    assert list_snapshots(other) == ["step_00000001.pt"]
