"""Text -> training and validation part -> windows -> the order in which training takes them.

The window of a sample is computed from the seed and the sample's number. There is no sampler, and no state of one to
save: a run that knows how many samples it has trained on continues with the next.

Both datasets take a range or list of numbers for a batch, which the trainer uses, and are map-style datasets for other
programs: an int from 0 to len - 1 gives one window.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mingpt.config.schema import DataConfig
from mingpt.errors import UserError
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.text.corpus import Corpus
from mingpt.text.permutation import hash64, permute


def train_val_split(corpus: Corpus, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of the training part, which comes first in the text, and of the validation part.

    Raises:
        UserError: either part is shorter than a window and its last target.
    """
    train_length, val_length = split_lengths(len(corpus.tokens), config)
    train = corpus.tokens[:train_length]
    val = corpus.tokens[train_length : train_length + val_length]
    return train, val


def split_lengths(characters: int, config: DataConfig) -> tuple[int, int]:
    """Returns the lengths of the training part and of the validation part of a text, given its number of characters.

    Raises:
        UserError: either part is shorter than a window and its last target.
    """
    if config.truncate is not None:
        characters = round(characters * config.truncate)
    train_length = int(characters * config.train_split)
    val_length = characters - train_length
    for name, length in (("training", train_length), ("validation", val_length)):
        if length < config.block_size + 1:
            raise UserError(
                f"data.block_size: the {name} part of {config.path} has {length} characters, "
                f"a window needs block_size + 1 = {config.block_size + 1}; lower data.block_size, move "
                f"data.train_split ({config.train_split}) or use more text"
            )
    return train_length, val_length


class CharDataset(Dataset):
    """Windows of the training text, numbered without end: sample i is in epoch i // len(dataset).

    An epoch cuts the text into `len(dataset)` windows, one after the other, and holds each of them once. Every epoch
    has an order of its own, and an offset of its own: the position in the text at which its first window starts.
    `dataset[range(7, 9)]` is a batch of two samples, of any epoch; `dataset[7]` is a sample of the first epoch.

    Args:
        tokens: (n,) training text, n > block_size
        block_size: characters in a window (T)
        seed: determines orders and offsets
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        # Up to T characters stay outside of the windows, so that all epochs have the same number whatever their offset.
        self.windows = max(1, (len(tokens) - block_size) // block_size)
        # Offsets are below this number. The last character is only a target.
        self.offsets = min(block_size, len(tokens) - self.windows * block_size)

    def __len__(self) -> int:
        """The number of windows in an epoch."""
        return self.windows

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Returns the position in the text, (B,), at which the window of each sample starts."""
        epoch, index = np.divmod(samples, self.windows)
        offset = hash64(self.seed, epoch, 0) % np.uint64(self.offsets)
        window = permute(index, self.windows, key=hash64(self.seed, epoch, 1))
        return offset.astype(np.int64) + window * self.block_size

    def __getitem__(self, samples: int | Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64: (T,) for one sample number, (B, T) for several.

        Raises:
            IndexError: one number is not in the first epoch; as in a list, negative ones count from its end.
        """
        if isinstance(samples, int | np.integer):
            [idx], [targets] = self[[range(self.windows)[samples]]]
            return idx, targets
        starts = self.starts(np.asarray(samples, dtype=np.int64))
        positions = starts[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        text = torch.from_numpy(self.tokens[positions].astype(np.int64))
        # The target of each character is the next one.
        return text[:, :-1], text[:, 1:]


class ValidationDataset(Dataset):
    """The validation text in windows, in the order of the text.

    The last window of the text may be shorter than the others, and those after it are empty; missing targets are
    IGNORE_INDEX.

    Args:
        tokens: (n,) validation text, n > 1
        block_size: characters in a window (T)
        max_windows: if the text has more windows, this many of them, evenly spread; None: all
    """

    def __init__(self, tokens: np.ndarray, block_size: int, max_windows: int | None = None) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.windows_in_text = math.ceil((len(tokens) - 1) / block_size)
        self.windows = self.windows_in_text
        if max_windows is not None:
            self.windows = min(max_windows, self.windows_in_text)

    def __len__(self) -> int:
        return self.windows

    def starts(self, windows: Sequence[int]) -> np.ndarray:
        """Returns the position in the text, (B,), at which each of these windows starts."""
        window_in_text = np.asarray(windows, dtype=np.int64) * self.windows_in_text // self.windows
        return window_in_text * self.block_size

    def count(self, windows: range) -> int:
        """Returns the number of targets in these windows."""
        targets_left = len(self.tokens) - 1 - self.starts(windows)
        return int(targets_left.clip(0, self.block_size).sum())

    def __getitem__(self, windows: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64: (T,) for one window, (B, T) for several.

        Raises:
            IndexError: the number of one window is not below len; as in a list, negative ones count from the end.
        """
        if isinstance(windows, int | np.integer):
            [idx], [targets] = self[[range(self.windows)[windows]]]
            return idx, targets
        positions = self.starts(windows)[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        last = len(self.tokens) - 1
        text = self.tokens[np.minimum(positions, last)].astype(np.int64)
        has_target = positions[:, :-1] < last
        idx = torch.from_numpy(np.where(has_target, text[:, :-1], 0))
        targets = torch.from_numpy(np.where(has_target, text[:, 1:], IGNORE_INDEX))
        return idx, targets
