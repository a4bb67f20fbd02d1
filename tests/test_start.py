"""What a run checks and locks before it is built."""

import logging
import os
import re
from pathlib import Path

import pytest

from mingpt import start
from mingpt.config.schema import Config, DataConfig
from mingpt.start import write_default_text


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
