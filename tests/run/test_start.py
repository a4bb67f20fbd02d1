"""What a run checks and locks before it is built."""

import os
from pathlib import Path

from tests.helpers import run_args, run_captured, run_ranks


def test_a_run_does_not_lock_itself_out_by_two_names_of_one_folder(text: Path, tmp_path: Path) -> None:
    options = {"trainer__max_steps": 1, "trainer__snapshot_path": tmp_path / "run"}
    argv = run_args(Path("run"), text, **options)
    [(status, out, err)] = run_ranks(1, _train_in, tmp_path, *argv, tmp_path=tmp_path)
    assert (status, err) == (0, ""), out
    assert (tmp_path / "run/step_00000001.pt").exists()


def _train_in(folder: Path, *argv: str) -> tuple[int, str, str]:
    os.chdir(folder)
    return run_captured(*argv)
