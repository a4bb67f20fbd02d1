"""Helpers within a process: texts, models, trainers, snapshots and messages."""

import io
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import main
from data import prepare
from mingpt import program
from mingpt.config.parser import read_config
from mingpt.config.schema import Config, DistributedConfig, GPTConfig, config_to_dict
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import detect_launch_environment
from mingpt.snapshot.folder import SnapshotFolder
from mingpt.text.tokenizer import CharTokenizer, JSONTokenizer, snapshot_entries
from model import GPT
from tests.helpers import init_method, write_text
from trainer import Trainer

V, T = 11, 8  # vocabulary size and window of `small_gpt`

# With these options, the validation loss of step 4 is the lowest of a run on this text.
OVERFITTING: dict[str, Any] = {
    "trainer__seed": 3,
    "trainer__max_steps": 40,
    "optimizer__learning_rate": 0.03,
    "optimizer__decay_steps": 40,
}


def write_overfitting_text(path: Path) -> Path:
    """Writes a text whose validation part is shuffled, so that the validation loss soon rises."""
    text = write_text(path).read_text()
    shuffled = random.Random(1).sample(text[2700:], 300)
    path.write_text(text[:2700] + "".join(shuffled))
    return path


def prepare_text(text: Path | str, out: Path, tokenizer: str, *options: str) -> None:
    """Runs data/prepare.py in this process."""
    assert program.run_program(prepare.run, [str(text), "--out", str(out), "--tokenizer", tokenizer, *options]) == 0


def byte_pair_tokenizer(text: str, size: int) -> JSONTokenizer:
    """Returns a tokenizer that was trained on a text. Skips a test without tokenizers."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    return prepare.train_tokenizer(iter([text]), len(text), size)


def hub_form(tokenizer: JSONTokenizer) -> str:
    """Returns a tokenizer.json in the form of GPT-2's on the hub: its model has no type, and merges are strings.

    A template, which GPT-2 does not have, adds a token to each text.
    """
    content = json.loads(tokenizer.to_json())
    del content["model"]["type"]
    merges = content["model"]["merges"]
    content["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    end = "<|endoftext|>"
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end, "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end: {"id": end, "ids": [0], "tokens": [end]}},
    }
    return json.dumps(content)


def small_gpt(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": V, "block_size": T} | changes))


def random_gpt(**changes: Any) -> GPT:
    """Returns a model with large weights in float64. An untrained model repeats its last character."""
    model = small_gpt(seed=3, **changes).double()
    for name, parameter in model.named_parameters():
        if "ln_" not in name:
            nn.init.normal_(parameter, std=1.0 if parameter.dim() >= 2 else 0.2)
    return model


def random_tokens(*shape: int, seed: int = 1, vocab_size: int = V) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def call_before(owner: Any, name: str, function: Callable[..., Any], patch: Callable[..., None] = setattr) -> None:
    """For `run_ranks`: calls a function before each call of a method, with the same arguments.

    In the test's process, `patch` must be undone, like monkeypatch.setattr.
    """
    method = getattr(owner, name)

    def both(*args: Any, **options: Any) -> Any:
        function(*args, **options)
        return method(*args, **options)

    patch(owner, name, both)


@contextmanager
def open_process_group() -> Iterator[DistributedContext]:
    """For `run_ranks`: the process group of main.py."""
    config = DistributedConfig(init_method=init_method(), timeout_seconds=60)
    with main.process_group(Config(distributed=config), detect_launch_environment(os.environ)) as context:
        yield context


@contextmanager
def open_trainer(*argv: str) -> Iterator[Trainer]:
    """For `run_ranks`: a trainer in this process, without its output."""
    config = read_config([*argv, "--distributed.init_method", init_method()])
    with (
        main.process_group(config, detect_launch_environment(os.environ)) as context,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        trainer = Trainer(config, context)
        yield trainer
        trainer.close()


def train_losses(trainer: Trainer, steps: int) -> list[float]:
    """Trains this number of steps. Returns the mean loss over the batch of each step."""
    return [trainer.strategy.mean_loss(trainer.train_step().losses).item() for _ in range(steps)]


def list_snapshots(run_dir: Path) -> list[str]:
    """Returns the names of all files in the folder of snapshots."""
    return sorted(os.listdir(run_dir / "snapshots"))


def newest_snapshot(run_dir: Path) -> dict:
    snapshot = SnapshotFolder(str(run_dir / "snapshots")).load_newest()
    assert snapshot is not None
    return snapshot


def small_snapshot(step: int, weights: dict[str, Tensor] | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the content of a snapshot, by default with one weight. Its elements are the step."""
    return {
        "version": "1.0.0",
        "format": 3,
        "step": step,
        "samples": 7 * step,
        "val_loss": None,
        "best": {"step": None, "val_loss": math.inf},
        "config": config_to_dict(Config()),
        **snapshot_entries(CharTokenizer("ab")),
        "choices": {"precision": "fp32", "threads": 1, "world_size": 1, "hardware": "any"},
        "learning_rate": 0.1,
        "text_sha256": "",
        "train_split": 0.9,
        "scaler": {},
        "code": {},
        "param_groups": [],
        "model": weights or {"weight": torch.full((3, 4), float(step))},
        "optimizer": {},
    } | changes


def max_relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def assert_one_message(stderr: str, *parts: str) -> None:
    """Asserts that the output is one message of an error, with these parts."""
    first, *more = stderr.splitlines()
    assert re.match(r"error: \S", first), stderr
    assert stderr.count("error: ") == 1, stderr
    assert "Traceback" not in stderr
    assert all(line.startswith("  ") for line in more), stderr  # a list of mistakes is indented
    assert [part for part in parts if part not in stderr] == [], stderr
