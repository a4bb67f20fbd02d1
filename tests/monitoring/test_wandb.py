"""trainer.wandb_project, with the real wandb in its offline mode, and without it."""

import re
import sys
from pathlib import Path

import pytest

from tests.helpers import assert_one_message, run_args, run_captured, run_each_captured, run_main, run_ranks


def test_a_run_and_its_resumption_are_one_run_of_the_project(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run_dir = tmp_path / "run"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"trainer__wandb_project": "letters", "optimizer__decay_steps": 12}
    argvs = [run_args(run_dir, text, trainer__max_steps=last_step, **options) for last_step in (8, 12)]
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert [(status, err) for status, _, err in results] == [(0, "")] * 2
    run_id = (run_dir / "wandb_id").read_text()
    files = list(run_dir.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2
    for file in files:
        assert all(word in file.read_bytes() for word in (b"letters", b"tokens_per_second", b"val_loss"))


def test_without_an_api_key_the_run_is_refused(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"HOME": str(tmp_path), "WANDB_MODE": "online", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    argv = run_args(tmp_path / "run", text, trainer__wandb_project="letters")
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert "trainer.wandb_project: No API key configured" in err
    assert "WANDB_MODE=offline" in err


def test_without_wandb_the_run_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run_main(run_args(tmp_path / "run", text, trainer__wandb_project="letters")) == 2
    err = capsys.readouterr().err
    assert_one_message(err)
    assert re.search("trainer.wandb_project: .*wandb.*; run `pip install wandb`", err)
