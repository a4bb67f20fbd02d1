"""Run folders that are moved or copied, and whose files are renamed, or left by a killed process."""

import re
import shutil
import uuid
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.snapshot.load import load_pretrained
from tests.helpers import (
    list_snapshots,
    run_args,
    run_captured,
    run_ranks,
    train_main,
    write_text,
)


@pytest.fixture
def trained(text: Path, tmp_path: Path) -> Path:
    """The folder of a run of 6 steps whose yaml has all options."""
    argv = run_args(tmp_path / "runs/X", text, trainer__max_steps=6, trainer__eval_every=100)
    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    return tmp_path / "runs/X"


def test_snapshots_that_were_renamed_are_named(trained: Path, tmp_path: Path) -> None:
    """By a download, by hand, or by a browser."""
    folder = tmp_path / "runs/downloaded/snapshots"
    folder.mkdir(parents=True)
    names = ["best.pt", "step_00000006 (1).pt", "step_00000006.pt.zip"]
    for name in names:
        shutil.copy(trained / "snapshots/step_00000006.pt", folder / name)
    argv = ["--config", f"{trained}/config.yaml", "--trainer.run_dir", str(folder.parent), "--trainer.max_steps", "1"]
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert (status, err) == (
        0,
        f"warning: {folder}: not named like step_00000500.pt, and not used: {', '.join(names)}\n",
    )
    (folder / "step_00000001.pt").unlink()
    for path in (folder, folder.parent):
        with pytest.raises(
            UserError, match=re.escape(f"; not named like step_00000500.pt: {', '.join(names)}; main.py")
        ):
            load_pretrained(str(path), "--snapshot")


def test_a_new_run_removes_what_a_killed_first_save_has_left(tmp_path: Path) -> None:
    left = tmp_path / f"run/snapshots/step_00000003.pt.{uuid.uuid4().hex}.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"a part")
    argv = run_args(tmp_path / "run", write_text(tmp_path / "text.txt"), trainer__max_steps=1)
    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    assert list_snapshots(tmp_path / "run") == ["step_00000001.pt"]
