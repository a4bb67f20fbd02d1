"""A run writes the tokens of its text once, and keeps them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import assert_same_run
from tests.helpers import run_args, run_each_captured, run_ranks, train_run, write_text
from tests.inside import assert_one_message, newest_snapshot


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_a_run_keeps_its_tokens_if_the_text_is_edited_or_deleted(text: Path, tmp_path: Path) -> None:
    whole = train_run(tmp_path / "whole", text, trainer__max_steps=6)
    run = train_run(tmp_path / "run", text, trainer__max_steps=2)
    written = {file.name: file.stat().st_mtime_ns for file in (run / "data").iterdir()}
    assert set(written) == {"train.bin", "val.bin", "tokenizer.json", "meta.json"}

    text.write_text("other text with other letters")
    argvs = [run_args(run, text, trainer__max_steps=4)]
    [[(status, _, err)]] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert status == 0
    assert f"warning: data.path: {text} has changed; this run keeps its tokens in {run}/data" in err
    text.unlink()
    train_run(run, text, trainer__max_steps=6)
    assert {file.name: file.stat().st_mtime_ns for file in (run / "data").iterdir()} == written
    assert_same_run(whole, run)


def test_another_text_needs_another_run_folder(text: Path, tmp_path: Path) -> None:
    other = shutil.copy(text, tmp_path / "other.txt")
    changes: list[dict[str, Any]] = [{}, {"data__train_split": 0.8}, {"data__field": "content"}]
    paths = [other, text, text]
    train_run(tmp_path / "run", text, trainer__max_steps=2)
    argvs = [run_args(tmp_path / "run", path, **keys) for path, keys in zip(paths, changes, strict=True)]
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    path_message = f"data.path is {other}, but this run trains on the tokens of {text}"
    messages = (path_message, "data.train_split is 0.8, but 0.9", "data.field is content, but text")
    for (status, _, err), message in zip(results, messages, strict=True):
        assert status == 2
        assert_one_message(err, message, "trainer.run_dir")


def test_a_start_before_the_first_snapshot_reads_the_text_again(text: Path, tmp_path: Path) -> None:
    whole = train_run(tmp_path / "whole", text, trainer__max_steps=2)
    run = train_run(tmp_path / "run", write_text(tmp_path / "other.txt"), trainer__max_steps=2)
    shutil.rmtree(run / "snapshots")
    train_run(run, text, trainer__max_steps=2)
    assert_same_run(whole, run)


def test_a_start_before_the_first_snapshot_without_the_text_deletes_nothing(text: Path, tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", text, trainer__max_steps=2)
    shutil.rmtree(run / "snapshots")
    text.unlink()
    argvs = [run_args(run, text, trainer__max_steps=2)]
    [[(status, _, err)]] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert status == 2
    assert_one_message(err, f"data.path: {text} can't be read: FileNotFoundError")
    assert (run / "data/train.bin").exists()


def test_tokens_that_are_lost_are_written_again_with_the_tokenizer_of_the_snapshot(text: Path, tmp_path: Path) -> None:
    whole = train_run(tmp_path / "whole", text, trainer__max_steps=4)
    run = train_run(tmp_path / "run", text, trainer__max_steps=2)
    shutil.rmtree(run / "data")
    train_run(run, text, trainer__max_steps=4)
    assert_same_run(whole, run)
    shutil.rmtree(run / "data")
    text.write_text(text.read_text() + "ž")
    argvs = [run_args(run, text, trainer__max_steps=6)]
    [[(status, _, err)]] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert status == 2
    assert_one_message(err, "data.path: the tokens 'ž' (1 distinct) are not in the training text's vocabulary")


def test_a_second_stage_on_another_part_of_the_text_is_named(text: Path, tmp_path: Path) -> None:
    first = train_run(tmp_path / "first", text, trainer__max_steps=2)
    same = run_args(tmp_path / "same", text, trainer__init_from=first, trainer__max_steps=1)
    split = {"data__train_split": 0.5, "trainer__init_from": first, "trainer__max_steps": 1}
    other = run_args(tmp_path / "other", text, **split)
    [results] = run_ranks(1, run_each_captured, [same, other], tmp_path=tmp_path)
    assert [status for status, _, _ in results] == [0, 0]
    said = [f"warning: {first} has trained on another part of the text" in err for _, _, err in results]
    assert said == [False, True]
    assert newest_snapshot(tmp_path / "other")["train_split"] == 0.5
