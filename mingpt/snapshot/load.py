"""Pretrained models: weights and vocabulary of a snapshot."""

import os
from dataclasses import dataclass, replace
from typing import Any

import fsspec
from torch import Tensor

from mingpt.config.conflicts import find_conflicts, refuse
from mingpt.config.schema import KEYS, SHAPE_KEYS, Config, GPTConfig
from mingpt.config.yaml_format import format_value
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.snapshot.format import gpt_config
from mingpt.snapshot.storage import DamagedSnapshotError, SnapshotStorage, load_snapshot
from mingpt.text.corpus import show_characters
from model import GPT

EMBEDDINGS = {"transformer.wte.weight", "lm_head.weight"}  # with a row for each character


@dataclass(frozen=True)
class Pretrained:
    """Weights and vocabulary of a trained model."""

    model_config: GPTConfig
    vocabulary: str  # its characters, in the order of their tokens
    weights: dict[str, Tensor]  # state dict, by GPT-2's parameter names
    snapshot: dict[str, Any]  # full content of the snapshot


def load_pretrained(path: str, option: str, best: bool = False) -> Pretrained:
    """Loads a snapshot.

    Args:
        path: a snapshot, or a folder of snapshots or run folder, whose newest undamaged snapshot is loaded; each may
            be an fsspec URL
        option: option or key that names the path, for messages
        best: load the snapshot with the lowest validation loss of a folder

    Raises:
        UserError: there is no undamaged snapshot, or with `best` no folder of snapshots.
    """
    advice = "it may be a snapshot, a run folder, or the URL of one"
    if not path:  # as of a shell's variable that is not set; it would be the working directory
        raise UserError(f"{option} is empty; {advice}")
    path = path.rstrip("/") or "/"
    snapshot = None
    try:
        fs, name = fsspec.url_to_fs(path)
        if fs.isdir(name):
            snapshot = _load_from_folder(f"{path}/snapshots", best) or _load_from_folder(path, best)
        elif best:
            raise UserError(f"--best: {path} is no folder of snapshots; name a run folder")
        else:
            snapshot = load_snapshot(path)
    except UserError:
        raise
    except DamagedSnapshotError as error:
        raise UserError(
            f"{option}: {path} is damaged: {error}; name another, or its folder, of which the newest undamaged one "
            "is loaded"
        ) from error
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # each file system raises its own
        raise UserError(f"{option}: {path} can't be read: {error}; {advice}") from error
    if snapshot is None:
        place = "" if "://" in path else f" (working directory {os.getcwd()})"
        raise UserError(f"{option}: no snapshot at {path}{place}; main.py makes them")
    return Pretrained(gpt_config(snapshot), snapshot["vocabulary"], snapshot["model"], snapshot)


def _load_from_folder(folder: str, best: bool) -> dict[str, Any] | None:
    """The newest undamaged snapshot, or the one that it names as the best so far.

    Frequent snapshots are only used if there is no other one: a run that is training replaces them.

    Raises:
        UserError: it can't be loaded.
    """
    storage = SnapshotStorage(folder, keep=1)
    frequent = SnapshotStorage(folder, keep=1, is_frequent=True)
    newest = storage.load_newest(logger.warning) or frequent.load_newest(logger.warning)
    if newest is None or not best:
        return newest
    best_step = newest.get("best", {}).get("step")  # None: there was no evaluation
    if best_step in (None, newest["step"]):
        return newest
    file = storage.file(best_step)
    try:
        return load_snapshot(file)
    except (DamagedSnapshotError, OSError) as error:
        raise UserError(
            f"--best: {file}, of lowest validation loss according to {storage.file(newest['step'])}, can't be loaded: "
            f"{error}; leave --best out for the newest, or name another file"
        ) from error


def adopt_shape(config: Config, header: dict[str, Any], source: str) -> Config:
    """Returns the configuration with the shape of a snapshot's model, where it has default values.

    Args:
        source: names the snapshot in messages

    Raises:
        UserError: a value that is no default differs from the snapshot's one, or does not go together with other keys.
    """
    mistakes = []
    adopted: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    for name in SHAPE_KEYS:
        section, key = name.split(".")
        found = getattr(getattr(config, section), key)
        allowed = header["config"][section][key]
        if found not in (allowed, KEYS[name].default):
            shown = format_value(allowed)
            mistakes.append(f"{name} is {format_value(found)}, but {shown} in {source}: set {name} to {shown}")
        adopted[section][key] = allowed
    if mistakes:
        raise UserError("\n  ".join(mistakes))
    sections = {name: replace(getattr(config, name), **values) for name, values in adopted.items()}
    config = replace(config, **sections)
    refuse(f"{message} (in {source})" for message in find_conflicts(config))
    return config


def load_initial_weights(path: str, model: GPT, vocabulary: str) -> dict[str, Tensor]:
    """Returns pretrained weights (trainer.init_from) for a model with another vocabulary.

    Embeddings of new characters are those of `model`, which is freshly initialized and has the shape of the weights.

    Raises:
        UserError: the weights can't be loaded.
    """
    pretrained = load_pretrained(path, "trainer.init_from")
    new = set(vocabulary) - set(pretrained.vocabulary)
    logger.info(f"starting from the weights of {path}; new characters: {show_characters(new)}")
    weights = dict(pretrained.weights)
    initial = model.state_dict()
    for name in EMBEDDINGS & weights.keys():
        weights[name] = initial[name].clone()  # (V, C)
        for token, character in enumerate(vocabulary):
            if character in pretrained.vocabulary:
                weights[name][token] = pretrained.weights[name][pretrained.vocabulary.index(character)]
    return weights
