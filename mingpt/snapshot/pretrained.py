"""Whose weights are these? A model with its characters, from a snapshot or from an export in Hugging Face's format."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from mingpt.config import GPTConfig
from mingpt.snapshot.storage import DamagedSnapshotError, SnapshotStorage, load_snapshot, local_copy
from mingpt.utils.errors import UserError
from model import GPT

# GPT-2's original code keeps these as (in, out), and so does transformers; torch.nn.Linear keeps (out, in).
TRANSPOSED = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")


@dataclass(frozen=True)
class Pretrained:
    """A model that has learned, and where it comes from.

    Args:
        shape: of the model
        vocabulary: its characters, in the order of their tokens
        weights: by GPT-2's parameter names, shapes as here
        snapshot: all else that the snapshot holds; empty for an export
    """

    shape: GPTConfig
    vocabulary: str
    weights: dict[str, Tensor]
    snapshot: dict[str, Any]

    def model(self) -> GPT:
        """The model with its weights."""
        model = GPT(self.shape)
        model.load_state_dict(self.weights)
        return model


def load_pretrained(path: str, asked_by: str, say: Callable[[str], None]) -> Pretrained:
    """Reads a model.

    Args:
        path: a snapshot, a folder of snapshots or run folder, of which the newest counts, or a folder that export.py
            has written; each may be an fsspec URL
        asked_by: the option or key that names the path, for messages
        say: is told which snapshots are damaged, and which one is used instead

    Raises:
        UserError: there is no whole snapshot and no export.
    """
    path = path.rstrip("/")
    snapshot = None
    try:
        fs, name = fsspec.url_to_fs(path)
        if fs.isdir(name):
            if fs.isfile(f"{name}/config.json"):
                return _read_export(path)
            for place in (f"{path}/snapshots", path):
                snapshot = snapshot or SnapshotStorage(place, keep=1).newest(say)
        else:
            snapshot = load_snapshot(path)
    except DamagedSnapshotError as error:
        raise UserError(
            f"{asked_by}: {path} is damaged: {error}; take another, or the folder, of which the newest whole one counts"
        ) from error
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{asked_by}: {path} is not as export.py writes it ({error!r}): export it again") from error
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"{asked_by}: {path} can't be read: {error}; it may be a snapshot, a run folder, an export's folder, or "
            "the URL of one"
        ) from error
    if snapshot is None:
        raise UserError(f"{asked_by}: no snapshot at {path} (working directory {os.getcwd()}); main.py makes them")
    config, vocabulary = snapshot["config"], snapshot["vocabulary"]
    shape = GPTConfig(**config["model"], vocab_size=len(vocabulary), block_size=config["data"]["block_size"])
    return Pretrained(shape, vocabulary, snapshot["model"], snapshot)


def _read_export(path: str) -> Pretrained:
    def content(name: str) -> Any:
        with fsspec.open(f"{path}/{name}", encoding="utf-8", mode="r") as file:
            return json.load(file)

    config, numbers = content("config.json"), content("tokenizer.json")["model"]["vocab"]
    shape = GPTConfig(
        **{name: config[name] for name in ("n_layer", "n_head", "n_embd", "bias")},
        dropout=config["resid_pdrop"],
        vocab_size=config["vocab_size"],
        block_size=config["n_positions"],
    )
    with local_copy(f"{path}/model.safetensors") as file:
        found = safetensors.torch.load_file(file)
    with torch.device("meta"):
        expected = GPT(shape).state_dict()
    weights = {}
    for name, like in expected.items():  # not all that is found: transformers' GPT-2 always has biases, here zeros
        weight = found[name].t().contiguous() if TRANSPOSED.fullmatch(name) else found[name]
        if weight.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, config.json says {tuple(like.shape)}")
        weights[name] = weight.float()
    return Pretrained(shape, "".join(sorted(numbers, key=numbers.get)), weights, {})


def adapt_weights(old: Pretrained, shape: GPTConfig, vocabulary: str, path: str) -> dict[str, Tensor]:
    """Weights for a model that goes on from another's, with fresh embeddings for characters that are new to it.

    Args:
        old: the other model
        shape: the model that is to start
        vocabulary: its characters
        path: where the other comes from, for messages

    Raises:
        UserError: the shapes differ.
    """
    for key in ("n_layer", "n_head", "n_embd", "bias", "block_size"):
        now, then = getattr(shape, key), getattr(old.shape, key)
        if now != then:
            section = "data" if key == "block_size" else "model"
            raise UserError(
                f"{section}.{key} is {now}, but {then} in trainer.init_from, {path}: set {section}.{key} to {then}"
            )
    rows = GPT(shape).transformer.wte.weight.detach().clone()
    for token, character in enumerate(vocabulary):
        if character in old.vocabulary:
            rows[token] = old.weights["transformer.wte.weight"][old.vocabulary.index(character)]
    return old.weights | {"transformer.wte.weight": rows}
