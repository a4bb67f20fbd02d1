"""The tokens that a run trains on and validates on: files of data/prepare.py, which the start of a run also writes."""

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.core import OpenFile

from mingpt.config.schema import DataConfig
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.text.documents import Texts
from mingpt.text.files import find_files, readable
from mingpt.text.prepare import prepare
from mingpt.text.tokenizer import Tokenizer, parse_tokenizer, read_tokenizer, snapshot_entries


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, in two parts.

    Attributes:
        tokenizer: `CharTokenizer` or `JSONTokenizer`
        validation_bytes: length of the validation text in UTF-8; nan: unknown
        entries: what snapshots contain of it: the tokenizer, and what identifies the text and its training part
    """

    tokenizer: Tokenizer
    training: np.ndarray
    validation: np.ndarray
    validation_bytes: float
    entries: dict[str, Any]

    def bits_per_byte(self, loss: float) -> float:
        """Converts the mean loss of the validation tokens from nats per token to bits per byte of their text.

        Unlike nats per token, it is comparable between tokenizers.
        """
        return loss / math.log(2) * len(self.validation) / self.validation_bytes


def is_token_folder(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "train.bin"))


def write_run_tokens(config: DataConfig, folder: Path, tokenizer: Tokenizer, is_new: bool) -> None:
    """Writes the tokens of a run's text into its folder, unless they are there.

    Args:
        tokenizer: of the run or of trainer.init_from
        is_new: whether the run is new: it writes tokens again, and may add characters to the vocabulary

    Raises:
        UserError: the text can't be used, or the folder has the tokens of another one.
    """
    if is_token_folder(str(folder)) and not is_new:
        _check_source(config.path, folder)
        return

    def choose_tokenizer(characters: set[str], train_length: int) -> Tokenizer:
        (folder / "train.bin").unlink(missing_ok=True)  # the text has been read once
        return tokenizer.extended(characters) if is_new else tokenizer

    files = find_files(config.path, "data.path")
    source = {"path": config.path, "files": _stamps(files)}
    prepare(Texts(files, "data.path", config.field), folder, config.train_split, choose_tokenizer, source)


def _check_source(path: str, folder: Path) -> None:
    """Raises a UserError if a run has the tokens of another text, and warns if the text has changed."""
    with readable(f"{folder}/meta.json", "trainer.run_dir"):
        source = json.loads((folder / "meta.json").read_text())["source"]
    if path != source["path"]:
        raise UserError(
            f"data.path is {path}, but this run trains on the tokens of {source['path']} in {folder}; set it to that "
            "text, or set another trainer.run_dir"
        )
    with suppress(UserError):  # it is gone
        if _stamps(find_files(path, "data.path")) != source["files"]:
            logger.warning(f"data.path: {path} has changed; this run keeps its tokens in {folder}")


def _stamps(files: list[OpenFile]) -> list[list[Any]]:
    """Returns name, size and modification time of each file."""
    infos = [file.fs.info(file.path) for file in files]
    return [[info["name"], info["size"], str(info.get("mtime"))] for info in infos]


def open_folder(folder: Path, config: DataConfig) -> Corpus:
    """Opens the files of data/prepare.py, or of nanoGPT, which have no meta.json and tokens of 16 bits.

    Raises:
        UserError: a file can't be used, or a part is shorter than a window and its last target.
    """
    for path in (folder.parent, folder):
        with suppress(OSError):
            os.listdir(path)  # refreshes an NFS client's cache; rank 0 may have just written the files
    if not (folder / "tokenizer.json").exists():
        raise UserError(
            f"data.path: {folder}/tokenizer.json is missing; copy the one that wrote train.bin. nanoGPT uses GPT-2's "
            "(docs/tokens.md)"
        )
    with readable(str(folder), "data.path"):
        meta_file = folder / "meta.json"
        meta = json.loads(meta_file.read_text()) if meta_file.exists() else {}
        if meta:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            tokenizer = parse_tokenizer(text, meta["end_of_text"])
        else:
            tokenizer = read_tokenizer(str(folder))
        dtype = np.dtype(meta.get("dtype", "uint16")).newbyteorder("<")
        parts: dict[str, np.ndarray] = {
            part: np.memmap(folder / f"{part}.bin", dtype, "r") for part in ("train", "val")
        }
    for part, tokens in parts.items():
        expected = meta[part]["tokens"] if part in meta else len(tokens)
        if len(tokens) != expected:
            raise UserError(
                f"data.path: {folder}/{part}.bin has {len(tokens)} tokens, but {expected} according to meta.json; copy "
                "or write it again"
            )
    entries = {name: meta.get(name) for name in ("text_sha256", "train_split")} | snapshot_entries(tokenizer)
    size = meta["val"]["bytes"] if "val" in meta else math.nan
    training = parts["train"]
    if config.truncate is not None:
        training = training[: round(len(training) * config.truncate)]
    for name, tokens in (("training", training), ("validation", parts["val"])):
        if len(tokens) < config.block_size + 1:
            raise UserError(
                f"data.block_size: the {name} part of {folder} has {len(tokens)} tokens, but a window needs block_size "
                f"+ 1 = {config.block_size + 1}; lower data.block_size, use more text, or split it in another way "
                f"(data.train_split is {config.train_split}; data/prepare.py has --train_split)"
            )
    return Corpus(tokenizer, training, parts["val"], size, entries)
