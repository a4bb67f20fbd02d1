"""trainer.wandb_project, with the real wandb in its offline mode, and without it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from mingpt.monitoring import run_log
from tests.helpers import (
    assert_one_message,
    main_process,
    read_log,
    read_rows,
    run_args,
    run_captured,
    run_each_captured,
    run_main,
    run_ranks,
    start_ranks,
    wait_for_step,
)

FILE_HEADER = 7  # bytes
RECORD_HEADER = 7  # checksum, length in two bytes, type
BLOCK = 32768  # bytes; a record that does not fit into the rest of a block continues in the next


def read_run(file: Path) -> tuple[str, str, dict[int, dict[str, Any]]]:
    """Returns id and project of the run in an offline file, which is a LevelDB log, and its values by step."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    position = FILE_HEADER
    data = b""
    run_id = project = ""
    history: dict[int, dict[str, Any]] = {}
    while position < len(content):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < RECORD_HEADER:
            position += left_in_block
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]  # 1: whole, 2: first part, 3: middle, 4: last
        position += RECORD_HEADER
        data += content[position : position + size]
        position += size
        if kind in (2, 3):
            continue
        record = Record.FromString(data)
        data = b""
        if record.HasField("run"):
            run_id, project = record.run.run_id, record.run.project
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            history[record.history.step.num] = {name: value for name, value in values.items() if name[0] != "_"}
    return run_id, project, history


def expected_history(run_dir: Path) -> dict[int, dict[str, Any]]:
    history: dict[int, dict[str, Any]] = {}
    for row in [*read_rows(run_dir), *read_rows(run_dir, "eval")]:
        history.setdefault(row["step"], {}).update(
            {name: row[name] for name in row if name not in ("event", "step", "time")}
        )
    return history


def test_a_run_and_its_resumption_are_one_run_of_the_project(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run_dir = tmp_path / "run"
    sent: dict[int, dict[str, Any]] = {}
    ids = set()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"trainer__wandb_project": "letters", "optimizer__decay_steps": 12}
    argvs = [run_args(run_dir, text, trainer__max_steps=last_step, **options) for last_step in (8, 12)]
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert [(status, err) for status, _, err in results] == [(0, "")] * 2
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        run_id, project, history = read_run(file)
        assert project == "letters"
        assert not sent.keys() & history.keys()
        ids.add(run_id)
        sent |= history
    assert ids == {(run_dir / "wandb_id").read_text()}
    expected = expected_history(run_dir)
    assert list(expected) == list(range(1, 13))
    assert sent == expected


@pytest.mark.slow
def test_training_continues_when_the_process_of_wandb_is_killed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run_dir = tmp_path / "run"
    argv = run_args(run_dir, text, trainer__wandb_project="letters", trainer__max_steps=100_000)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    [process], _ = start_ranks(1, main_process, argv, os.devnull, tmp_path / "stderr", tmp_path=tmp_path)
    wait_for_step(run_dir, 20)
    for child in psutil.Process(process.pid).children():
        if "wandb" in child.name():
            child.kill()
    wait_for_step(run_dir, read_rows(run_dir)[-1]["step"] + 20)
    process.terminate()
    process.join(60)
    assert process.exitcode == 143
    err = read_log(tmp_path / "stderr")
    assert re.findall(r"^warning: .*$", err, re.MULTILINE) == err.splitlines()
    assert err.count("trainer.wandb_project: wandb has failed") == len(err.splitlines()) == 1


def test_without_wandb_nothing_is_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_log.importlib.util, "find_spec", lambda name: None)
    assert run_main(run_args(tmp_path / "run", text, trainer__wandb_project="letters")) == 2
    err = capsys.readouterr().err
    assert_one_message(err)
    assert "trainer.wandb_project is letters, which needs wandb: run `pip install wandb`" in err
    assert not (tmp_path / "run").exists()


def test_without_an_api_key_the_run_is_refused(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"HOME": str(tmp_path), "WANDB_MODE": "online", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    argv = run_args(tmp_path / "run", text, trainer__wandb_project="letters")
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert "trainer.wandb_project: No API key configured" in err
    assert "WANDB_MODE=offline" in err
