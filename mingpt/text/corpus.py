"""The tokens that a run trains on and validates on: of a text, which is read, or of a folder of data/prepare.py."""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from char_dataset import train_val_split
from mingpt.config.schema import Config, DataConfig
from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.text.files import find_files, open_text, readable
from mingpt.text.token_file import TokenFile, Tokens
from mingpt.text.tokenizer import Tokenizer, parse_tokenizer

DECODED_TOKENS = 1_000_000  # from which the bytes per token of a text are estimated


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, in two parts.

    Attributes:
        validation_bytes: length of the validation text in UTF-8
        sha256: identifies the text, and the tokens of a folder
    """

    tokenizer: Tokenizer
    training: Tokens
    validation: Tokens
    validation_bytes: float
    sha256: str

    def bits_per_byte(self, loss: float) -> float:
        """Converts the mean loss of the validation tokens from nats per token to bits per byte of their text.

        Unlike nats per token, it is comparable between tokenizers.
        """
        return loss / math.log(2) * len(self.validation) / self.validation_bytes


def check_text(path: str) -> None:
    """Raises a UserError if a path does not lead to a text or to tokens."""
    if "://" in path:
        logger.info(f"requesting {path}")  # a server may take minutes to answer
    if not is_token_folder(path):
        find_files(path, "data.path")


def is_token_folder(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "train.bin"))


def read_corpus(config: Config, tokenizer: Tokenizer) -> Corpus:
    """Returns the tokens of data.path.

    Args:
        tokenizer: of a text file, whose new characters it gets; a folder has its own

    Raises:
        UserError: data.path can't be used, or a part is shorter than a window and its last target.
    """
    data = config.data
    corpus = _open_folder(config) if is_token_folder(data.path) else _read_text(data, tokenizer)
    for name, part in (("training", corpus.training), ("validation", corpus.validation)):
        if len(part) < data.block_size + 1:
            raise UserError(
                f"data.block_size: the {name} part of {data.path} has {len(part)} tokens, but a window needs "
                f"block_size + 1 = {data.block_size + 1}; lower data.block_size, use more text, or split it in another "
                f"way (data.train_split is {data.train_split}; data/prepare.py has --train_split)"
            )
    return corpus


def read_text(path: str, key: str) -> str:
    """Returns the text of a file, a glob or a URL, for a key or an option; raises a UserError if there is none."""
    fs, names = find_files(path, key)
    text = ""
    for name in names:
        with readable(name, key), open_text(fs, name) as file:
            text += file.read()
    if not text:
        raise UserError(f"{key}: {path} is empty; name a file that contains text")
    return text


def _read_text(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    text = read_text(config.path, "data.path")
    tokenizer = tokenizer.extended(text)
    training, validation = train_val_split(tokenizer.encode(text, "data.path"), config)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Corpus(tokenizer, training, validation, len(tokenizer.decode(validation).encode()), digest)


def _open_folder(config: Config) -> Corpus:
    """Opens the files of data/prepare.py, or of nanoGPT, which have no meta.json and tokens of 16 bits."""
    data = config.data
    folder = Path(data.path)
    if not (folder / "tokenizer.json").exists():
        raise UserError(
            f"data.path: {folder}/tokenizer.json is missing; copy the one that wrote train.bin. nanoGPT uses GPT-2's "
            "(docs/tokens.md)"
        )
    with readable(data.path, "data.path"):
        meta_file = folder / "meta.json"
        meta = json.loads(meta_file.read_text()) if meta_file.exists() else {}
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = parse_tokenizer(text)
        dtype = np.dtype(meta.get("dtype", "uint16")).newbyteorder("<")
        parts = {part: TokenFile(folder / f"{part}.bin", dtype, tokenizer.vocab_size) for part in ("train", "val")}
    for part, tokens in parts.items():
        if meta and len(tokens) != (expected := meta[part]["tokens"]):
            raise UserError(
                f"data.path: {folder}/{part}.bin has {len(tokens)} tokens, but {expected} according to meta.json; copy "
                "or write it again"
            )
    training = parts["train"]
    validation = parts["val"]
    # Files without a digest are identified by their lengths.
    identity = json.dumps([text, *(meta.get(part, len(tokens)) for part, tokens in parts.items())])
    if meta:
        size = meta["val"]["bytes"]
    else:
        sample = validation[:DECODED_TOKENS]
        size = len(tokenizer.decode(sample).encode()) * len(validation) / len(sample)
    if data.truncate is not None:
        training.length = round(len(training) * data.truncate)
    return Corpus(tokenizer, training, validation, size, hashlib.sha256(identity.encode()).hexdigest())
