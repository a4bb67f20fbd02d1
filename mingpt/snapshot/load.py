"""Loads snapshots for other programs and new runs, and compares a configuration with the keys of a snapshot."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import fsspec
from torch import Tensor

from mingpt.config.schema import KEYS, SHAPE_KEYS, Config, GPTConfig, by_section
from mingpt.config.yaml_format import format_value
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.snapshot.folder import SnapshotFolder, load_snapshot, raise_user_error
from mingpt.snapshot.format import OTHER_PROGRAMS, Header, Snapshot, gpt_config
from mingpt.snapshot.hf_format import EMBEDDINGS, load_folder
from mingpt.text.tokenizer import Tokenizer, restore_tokenizer, show_tokens
from model import GPT

NEW_RUN = "set another trainer.run_dir"  # then a new run does not find the snapshots of this one


@dataclass(frozen=True)
class Pretrained:
    """Weights and tokenizer of a trained model."""

    model_config: GPTConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # state dict with GPT-2's parameter names
    snapshot: Snapshot  # full content of the snapshot

    def build_model(self) -> GPT:
        """Returns the model; raises a UserError if its code has other parameters."""
        model = GPT(self.model_config)
        if differences := weight_differences(self.weights, model.state_dict()):
            raise UserError(f"--snapshot: the weights are not those of the model in model.py: {differences}")
        model.load_state_dict(self.weights)
        return model


def load_pretrained(path: str, option: str, best: bool = False) -> Pretrained:
    """Loads a snapshot, or weights of transformers.

    Args:
        path: a snapshot; or a run folder or folder of snapshots, to load its newest undamaged one; or an fsspec URL of
            either; or a folder of transformers, which has config.json, tokenizer.json and safetensors
        option: option or key that names the path, for messages
        best: load the snapshot with the lowest validation loss of a folder

    Raises:
        UserError: there is no undamaged snapshot.
    """
    advice = "name a snapshot, a run folder, the URL of one, or a folder of transformers"
    with raise_user_error(f"{option}: {path} can't be loaded", advice):
        fs, name = fsspec.url_to_fs(path)
        if os.path.isfile(f"{path}/config.json"):
            snapshot: Snapshot | None = load_folder(Path(path), option)
        elif fs.isdir(name):
            snapshot = _load_from_folder(f"{path}/snapshots", best) or _load_from_folder(path, best)
        else:
            snapshot = load_snapshot(path)
    if snapshot is None:
        raise UserError(f"{option}: no snapshot in {path}; main.py saves them; {OTHER_PROGRAMS}")
    return Pretrained(gpt_config(snapshot), restore_tokenizer(snapshot), snapshot["model"], snapshot)


def _load_from_folder(path: str, best: bool) -> Snapshot | None:
    """Loads the newest undamaged snapshot, or the one that it names as the best so far."""
    folder = SnapshotFolder(path)
    newest = folder.load_newest()
    step = newest["best"]["step"] if newest and best else None  # None: there was no evaluation
    return newest if step is None else load_snapshot(folder.file(step))


def fit_config(
    config: Config, header: Header, source: str, names: Sequence[str], adopts_shape: bool, advice: str = ""
) -> Config:
    """Checks the given keys of the configuration against a snapshot, and returns the configuration.

    Args:
        source: names the snapshot in messages
        names: the keys
        adopts_shape: replace the defaults of keys of the model's shape by the snapshot's values, unless the command
            line gives them; in yaml files, a default may just be the value of gpt2_train_cfg.yaml
        advice: end of the message

    Raises:
        UserError: keys differ, which the message lists.
    """
    mistakes = []
    adopted = {}
    for name in names:
        section, key = name.split(".")
        found = attrgetter(name)(config)
        saved = header["config"][section].get(key, KEYS[name].default)  # the code may be newer
        if isinstance(saved, list):
            saved = tuple(saved)
        if found == saved:
            continue
        is_given = found != KEYS[name].default or name in config.given
        if adopts_shape and name in SHAPE_KEYS and not is_given:
            adopted[name] = saved
            continue
        shown = format_value(saved)
        mistakes.append(f"{name} is {format_value(found)}, but {shown} in {source}; set it to {shown}")
    if mistakes:
        raise UserError("\n  ".join(mistakes) + advice)
    sections = {name: replace(getattr(config, name), **keys) for name, keys in by_section(adopted).items()}
    return replace(config, **sections)


def load_initial_weights(pretrained: Pretrained, path: str, model: GPT, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Returns pretrained weights (trainer.init_from) for a model with another tokenizer, and maybe with changed code.

    Parameters that no weight fits, and embeddings of new tokens, keep the values of `model`.

    Args:
        path: names the weights in messages

    Raises:
        UserError: none of the weights fits.
    """
    new = set(tokenizer.vocabulary) - set(pretrained.tokenizer.vocabulary)
    logger.info(f"starting from the weights of {path}; new tokens: {show_tokens(new)}")
    initial = model.state_dict()
    weights = dict(pretrained.weights)
    old_rows = {token: row for row, token in enumerate(pretrained.tokenizer.vocabulary)}
    rows = [row for row, token in enumerate(tokenizer.vocabulary) if token in old_rows]
    sources = [old_rows[token] for token in tokenizer.vocabulary if token in old_rows]
    for name in EMBEDDINGS & weights.keys() & initial.keys():
        weights[name] = initial[name].clone()  # (V, C)
        weights[name][rows] = pretrained.weights[name][sources]
    if (positions := "transformer.wpe.weight") in weights:
        weights[positions] = weights[positions][: model.config.block_size]  # the window may be shorter
    fitting = {
        name: weights[name] for name in initial if name in weights and weights[name].shape == initial[name].shape
    }
    if differences := weight_differences(weights, initial):
        if not fitting:
            raise UserError(f"trainer.init_from: no weights of {path} fit the model: {differences}")
        logger.warning(f"some weights of {path} do not fit the model, and are not used: {differences}")
    return initial | fitting


def weight_differences(weights: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str:
    """Returns which names and shapes of weights differ from a model's, whose code has changed; empty: none."""
    common = [name for name in model if name in weights]
    lists = {
        "new in the model": [name for name in model if name not in weights],
        "missing in the model": [name for name in weights if name not in model],
        "of another shape": [name for name in common if weights[name].shape != model[name].shape],
    }
    parts = []
    for difference, names in lists.items():
        layers = dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in names)  # like the table at the start
        if layers:
            parts.append(f"{difference}: {', '.join(layers)}")
    return "; ".join(parts)
