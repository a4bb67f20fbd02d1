"""The default text."""

import logging
import os
import re
from pathlib import Path

import pytest

from mingpt import start
from mingpt.config.schema import Config, DataConfig
from mingpt.start import write_default_text


def test_a_missing_default_text_is_written_and_an_existing_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, logger="mingpt"):
        write_default_text(Config())
    text = (tmp_path / "data/input.txt").read_text(encoding="utf-8")
    [message] = caplog.messages
    assert re.fullmatch(rf"data/input\.txt: help topics of Python [\d.]+, {len(text):,} characters", message)
    assert os.listdir(tmp_path / "data") == ["input.txt"]
    assert 100_000 < len(text) < 1_000_000
    assert len(set(text)) < 256
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))  # otherwise, validation text would be trained on
    (tmp_path / "data/input.txt").write_text("my text")
    write_default_text(Config())
    assert (tmp_path / "data/input.txt").read_text() == "my text"

    os.remove("data/input.txt")
    write_default_text(Config(data=DataConfig(path="data/other.txt")))
    monkeypatch.setattr(start, "ROOT", tmp_path.parent)
    write_default_text(Config())
    assert os.listdir(tmp_path / "data") == []  # only the default text of the checkout is written
