"""Defines and checks the content of snapshots, which another version of the program may have written."""

import json
import math
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mingpt.config.schema import SHAPE_KEYS, GPTConfig, ModelConfig
from mingpt.errors import UserError

FORMAT_VERSION = 2
OTHER_PROGRAMS = "weights of other programs must be a folder of transformers (docs/export.md)"
# Keys that can't change in a run. They determine the meaning of tensors, the part of the text, and the sample order.
KEPT_KEYS = (*SHAPE_KEYS, "data.train_split", "data.truncate", "optimizer.name", "trainer.seed")
# The required entries and their types. Everything except `model` and `optimizer` is the header of a snapshot.
CONTENT: dict[str, type] = {
    "step": int,
    "samples": int,
    "val_loss": object,  # at this step; None: not evaluated
    "vocabulary": str,  # the characters, if they are the tokens
    "tokenizer": object,  # the text of a tokenizer.json; None: the tokens are characters
    "vocab_size": int,
    "choices.precision": str,
    "choices.threads": int,
    "choices.world_size": int,
    "choices.hardware": str,
    "learning_rate": float,
    "text_sha256": str,
    "scaler": dict,  # empty unless the run used fp16
    "model": dict,  # weights by parameter name
    "optimizer": dict,  # tensors by parameter name and kind
    "config.model": dict,
    "config.trainer.save_every": int,
    **{f"config.{name}": object for name in (*KEPT_KEYS, "trainer.init_from")},
}


@dataclass
class Best:
    """The evaluation with the lowest validation loss so far. The snapshot of its step is kept."""

    step: int | None = None
    val_loss: float = math.inf


def check_content(content: Any, path: str) -> None:
    """Checks that the content of a file is a snapshot. Adds entries that a snapshot of an earlier version lacks.

    Missing keys of the model get their defaults, so a new key's default must keep the old behavior.

    Args:
        path: names the file in the message

    Raises:
        UserError: another program wrote the file, or entries are missing or of another type; the message lists them.
    """
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(f"{path} is not a snapshot of main.py, since it lacks the entry `format`; {OTHER_PROGRAMS}")
    with suppress(LookupError, TypeError):
        model = content["config"]["model"]
        if model.get("conv_kernel_size") is None:  # a key of earlier versions
            model.pop("conv_kernel_size", None)
        if model.get("architecture") == "gpt2":  # the same; snapshots of nanochat are refused
            model.pop("architecture")
        content["config"]["model"] = asdict(ModelConfig()) | model
        content.setdefault("tokenizer", None)
        content.setdefault("vocab_size", len(content["vocabulary"]))
        content.setdefault("run_id", "")
    if mistakes := list(_find_mistakes(content)):
        raise UserError(
            f"{path} is not a snapshot that this version can read: {'; '.join(mistakes)}; use the version that wrote it"
        )
    save_every = content["config"]["trainer"]["save_every"]
    content.setdefault("scheduled", list(range(0, content["step"] + 1, save_every)))
    # Earlier versions did not save at every lowest evaluation, so `lowest` may be of another step than `best`.
    best = content.pop("lowest", {}) | content.get("best", {})
    content["best"] = {key: best.get(key, default) for key, default in asdict(Best()).items()}
    content.setdefault("best_saved", content["best"]["step"])  # None: none


def _find_mistakes(content: dict[str, Any]) -> Iterator[str]:
    version = content["format"]
    if version != FORMAT_VERSION:
        yield f"format is {version}, must be {FORMAT_VERSION}"
        return
    is_complete = True
    for name, kind in CONTENT.items():
        value = content
        try:
            for key in name.split("."):
                value = value[key]
        except (LookupError, TypeError):
            yield f"{name} is missing"
            is_complete = False
            continue
        if not isinstance(value, kind):
            yield f"{name} is {reprlib.repr(value)}, must be {kind.__name__}"
            is_complete = False
    if is_complete:
        try:
            gpt_config(content)
        except ValidationError as invalid:
            for error in invalid.errors():
                yield f"config.model.{error['loc'][0]} is {error['input']!r}: {error['msg']}"


def split_header(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Returns a snapshot without its tensors."""
    return {key: value for key, value in snapshot.items() if key not in ("model", "optimizer")}


def gpt_config(snapshot: dict[str, Any]) -> GPTConfig:
    """Returns the shape of a snapshot's model."""
    config = snapshot["config"]
    sizes = {"vocab_size": snapshot["vocab_size"], "block_size": config["data"]["block_size"]}
    # In JSON, a list may be a tuple.
    return TypeAdapter(GPTConfig).validate_json(json.dumps(config["model"] | sizes))
