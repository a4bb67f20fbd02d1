"""What a run checks and locks before it is built."""

import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mingpt import start
from mingpt.config.schema import Config, DataConfig
from mingpt.start import write_default_text
from mingpt.text.corpus import Corpus
from tests.helpers import open_trainer, run_args, run_captured, run_each_captured, run_ranks, train_main


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that counts as the repository's folder."""
    monkeypatch.setattr(start, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_missing_default_text_is_written_and_an_existing_one_is_kept(
    checkout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mingpt"):
        write_default_text(Config())
    text = (checkout / "data/input.txt").read_text(encoding="utf-8")
    [message] = caplog.messages
    assert re.fullmatch(rf"data/input\.txt: help topics of Python [\d.]+, {len(text):,} characters", message)
    assert os.listdir(checkout / "data") == ["input.txt"]
    assert 100_000 < len(text) < 1_000_000
    assert len(set(text)) < 256
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))  # otherwise, validation text would be trained on
    (checkout / "data/input.txt").write_text("my text")
    write_default_text(Config())
    assert (checkout / "data/input.txt").read_text() == "my text"


def test_only_the_default_text_of_the_checkout_is_written(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_default_text(Config(data=DataConfig(path="data/other.txt")))
    monkeypatch.setattr(start, "ROOT", checkout.parent)
    write_default_text(Config())
    assert os.listdir(checkout) == []


def test_ranks_wait_for_the_slowest_reader_of_the_text(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1, distributed__timeout_seconds=1)
    results = run_ranks(2, _read_slowly_on_rank0, *argv, tmp_path=tmp_path)
    assert [(status, err) for status, _, err in results] == [(0, "")] * 2


def _read_slowly_on_rank0(*argv: str) -> tuple[int, str, str]:
    """Rank 0 reads the text for longer than the timeout."""
    read_corpus = start.read_corpus

    def read(*args: Any, **options: Any) -> Corpus:
        time.sleep(2.5 * (os.environ["RANK"] == "0"))
        return read_corpus(*args, **options)

    start.read_corpus = read
    return run_captured(*argv)


def test_a_second_run_in_another_thread_is_refused(text: Path, tmp_path: Path) -> None:
    [(status, err, later)] = run_ranks(1, _start_in_a_thread, text, tmp_path, tmp_path=tmp_path)
    assert status == 2
    assert err.startswith("error: another thread of this process is training, and ")
    assert err.count("\n") == 1
    assert later == 0


def _start_in_a_thread(text: Path, folder: Path) -> tuple[int, str, int]:
    """Returns status and message of a run that starts while this thread has a trainer, and the status after its end."""
    with open_trainer(*run_args(folder / "first", text)), ThreadPoolExecutor(1) as pool:
        status, _, err = pool.submit(run_captured, *run_args(folder / "second", text)).result()
    return status, err, train_main(*run_args(folder / "second", text, trainer__max_steps=1))


def test_a_run_warns_of_weights_that_may_have_been_trained_on_its_validation_text(text: Path, tmp_path: Path) -> None:
    weights = run_args(tmp_path / "weights", text, trainer__max_steps=1)
    tuned = run_args(tmp_path / "tuned", text, trainer__max_steps=1, data__train_split=0.5)
    argvs = [weights, [*tuned, "--trainer.init_from", str(tmp_path / "weights")]]
    [(_, (status, _, err))] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert status == 0
    assert err == (
        f"warning: {tmp_path}/weights has the same text, but other values of data.train_split or data.truncate, so it "
        "may have been trained on the validation text\n"
    )
