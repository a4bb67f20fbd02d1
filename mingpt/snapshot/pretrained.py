"""Pretrained models: weights and vocabulary of a snapshot, or of an export in Hugging Face's format."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mingpt.config import KEYS, Config, GPTConfig
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.snapshot.hf_format import CONFIG_KEYS, gpt_config, gpt_vocabulary, gpt_weights
from mingpt.snapshot.storage import DamagedSnapshotError, SnapshotStorage, load_snapshot, local_copy

SHAPE_KEYS = [
    ("model", "architecture"),
    ("model", "conv_kernel_size"),
    ("model", "gelu_approximate"),
    ("model", "n_layer"),
    ("model", "n_head"),
    ("model", "n_embd"),
    ("model", "bias"),
    ("data", "block_size"),
]
EMBEDDINGS = {"transformer.wte.weight", "lm_head.weight"}  # with a row for each character


@dataclass(frozen=True)
class Pretrained:
    """Weights and vocabulary of a trained model."""

    model_config: GPTConfig
    vocabulary: str  # its characters, in the order of their tokens
    weights: dict[str, Tensor]  # state dict, by GPT-2's parameter names
    snapshot: dict[str, Any]  # full content of the snapshot; empty for an export


def load_pretrained(
    path: str, option: str, build_model: Callable[[GPTConfig], nn.Module], best: bool = False
) -> Pretrained:
    """Loads a snapshot or an export.

    Args:
        path: a snapshot, a folder of snapshots or run folder (the newest undamaged one is loaded), or a folder that
            export.py has written; each may be an fsspec URL
        option: option or key that names the path, for messages
        build_model: builds the model that an export is compared with
        best: load the snapshot with the lowest validation loss of a folder

    Raises:
        UserError: there is no undamaged snapshot and no export, or with `best` no folder of snapshots.
    """
    if not path:  # as of a shell's variable that is not set; it would be the working directory
        raise UserError(f"{option} is empty; it may be a snapshot, a run folder or an export's folder, or a URL")
    path = path.rstrip("/") or "/"
    snapshot = None
    advice = "it may be a snapshot, a run folder, an export's folder, or the URL of one"
    try:
        fs, name = fsspec.url_to_fs(path)
        is_folder = fs.isdir(name)
        is_export = is_folder and fs.isfile(f"{name}/config.json")
        is_other = not is_folder and fs.exists(name) and fs.info(name)["type"] == "other"
    except Exception as error:  # each file system raises its own
        raise UserError(f"{option}: {path} can't be read: {error}; {advice}") from error
    if is_other:  # such as a named pipe, which would be waited for
        raise UserError(f"{option}: {path} is neither a file nor a folder; {advice}")
    if best and (is_export or not is_folder):
        raise UserError(f"--best: {path} is no folder of snapshots; name a run folder")
    try:
        if is_export:
            return _load_export(path, option, build_model)
        if is_folder:
            for folder in (f"{path}/snapshots", path):
                snapshot = snapshot or _load_from_folder(folder, best)
        else:
            snapshot = load_snapshot(path)
    except DamagedSnapshotError as error:
        raise UserError(
            f"{option}: {path} is damaged: {error}; name another, or its folder, of which the newest undamaged one "
            "is loaded"
        ) from error
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise UserError(f"{option}: {path} is not as export.py writes it ({error!r}): export it again") from error
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{option}: {path} can't be read: {error}; {advice}") from error
    if snapshot is None:
        raise UserError(f"{option}: no snapshot at {path} (working directory {os.getcwd()}); main.py makes them")
    config = snapshot["config"]
    vocabulary = snapshot["vocabulary"]
    model_config = GPTConfig(**config["model"], vocab_size=len(vocabulary), block_size=config["data"]["block_size"])
    return Pretrained(model_config, vocabulary, snapshot["model"], snapshot)


def _load_from_folder(folder: str, best: bool) -> dict[str, Any] | None:
    """The newest undamaged snapshot, or the one that it names as the best so far."""
    storage = SnapshotStorage(folder, keep=1)
    newest = storage.load_newest(logger.warning)
    if newest is None or not best:
        return newest
    best_step = newest.get("best", {}).get("step")  # None: there was no evaluation
    if best_step in (None, newest["step"]):
        return newest
    return load_snapshot(storage.file(best_step))


def _load_export(path: str, option: str, build_model: Callable[[GPTConfig], nn.Module]) -> Pretrained:
    def read_json(name: str) -> dict[str, Any]:
        with local_copy(f"{path}/{name}") as copy, open(copy, encoding="utf-8") as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise TypeError(f"{name} holds a {type(content).__name__}, no object")
        return content

    config = read_json("config.json")
    if (model_type := config.get("model_type")) not in CONFIG_KEYS:
        allowed = " or ".join(CONFIG_KEYS)
        raise UserError(f"{option}: model_type is {model_type} in {path}/config.json, must be {allowed}")
    model_config = gpt_config(config)
    vocabulary = gpt_vocabulary(read_json("tokenizer.json"))
    with local_copy(f"{path}/model.safetensors") as file:
        stored = safetensors.torch.load_file(file)
    with torch.device("meta"):
        expected = build_model(model_config).state_dict()
    return Pretrained(model_config, vocabulary, gpt_weights(model_config, stored, expected), {})


def adopt_shape(config: Config, build_model: Callable[[GPTConfig], nn.Module]) -> Config:
    """Returns the configuration with the shape of the weights in trainer.init_from, where it has default values.

    Weights that can't be loaded change nothing: a run that resumes does not need them, and a new one reports why.

    Raises:
        UserError: a value that is no default differs from the weights' one.
    """
    path = config.trainer.init_from
    if path is None:
        return config
    try:
        shape = load_pretrained(path, "trainer.init_from", build_model).model_config
    except UserError:
        return config
    mistakes = []
    adopted: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    for section, key in SHAPE_KEYS:
        name = f"{section}.{key}"
        found = getattr(getattr(config, section), key)
        allowed = getattr(shape, key)
        if found not in (allowed, KEYS[name].default):
            mistakes.append(f"{name} is {found}, but {allowed} in trainer.init_from, {path}: set {name} to {allowed}")
        adopted[section][key] = allowed
    if mistakes:
        raise UserError("\n  ".join(mistakes))
    return replace(
        config, model=replace(config.model, **adopted["model"]), data=replace(config.data, **adopted["data"])
    )


def load_initial_weights(path: str, model: Any, vocabulary: str) -> dict[str, Tensor]:
    """Returns pretrained weights (trainer.init_from) for a model with another vocabulary.

    Embeddings of new characters are those of `model`, which is freshly initialized and has the shape of the weights.

    Raises:
        UserError: the weights can't be loaded.
    """
    pretrained = load_pretrained(path, "trainer.init_from", type(model))
    new = set(vocabulary).difference(pretrained.vocabulary)
    logger.info(f"starting from the weights of {path}, with {len(new)} new characters {''.join(sorted(new))!r}")
    weights = dict(pretrained.weights)
    initial = model.state_dict()
    for name in EMBEDDINGS & weights.keys():
        weights[name] = initial[name].clone()  # (V, C)
        for token, character in enumerate(vocabulary):
            if character in pretrained.vocabulary:
                weights[name][token] = pretrained.weights[name][pretrained.vocabulary.index(character)]
    return weights
