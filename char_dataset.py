"""Datasets of characters: text -> windows -> global sample order.

The window of sample i is a pure function of (seed, i), so there is no sampler state to save.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mingpt.config import DataConfig
from mingpt.corpus import Corpus
from mingpt.loss import IGNORE_INDEX
from mingpt.utils.errors import UserError
from mingpt.utils.hashing import hash64

LOOKAHEAD = 4096  # samples whose starts are computed at once: a dozen take as long as thousands


def train_val_split(corpus: Corpus, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of the training part, which comes first in the text, and of the validation part.

    Raises:
        UserError: either part is shorter than a window and its last target.
    """
    tokens = corpus.tokens[: round(len(corpus.tokens) * (config.truncate or 1))]
    train, val = np.split(tokens, [int(len(tokens) * config.train_split)])
    for name, part in (("training", train), ("validation", val)):
        if len(part) < config.block_size + 1:
            raise UserError(
                f"data.block_size: the {name} part of {config.path} has {len(part)} characters, "
                f"a window needs block_size + 1 = {config.block_size + 1}; lower data.block_size, move "
                f"data.train_split ({config.train_split}) or use more text"
            )
    return train, val


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Applies a keyed permutation of range(size) to each index, without a table.

    An eight-round Feistel network permutes the smallest square that covers the range, and is applied again to results
    outside of the range (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        index: (n,) integers in [0, size)
        key: (n,) uint64, which selects the permutation for each index
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    index = index.astype(np.uint64)
    pending = np.arange(len(index))
    while len(pending):
        left, right = np.divmod(index[pending], side)
        for round_number in range(8):
            left, right = right, (left + hash64(key[pending], round_number, right) % side) % side
        index[pending] = left * side + right
        pending = pending[index[pending] >= size]
    return index.astype(np.int64)


class CharDataset(Dataset):
    """Training windows, numbered without end: sample i is window i % len of epoch i // len.

    Each epoch holds each window once, in its own order, and its windows start at its own offset in the text.
    `dataset[7]` is a sample, `dataset[range(7, 9)]` a batch.

    Args:
        tokens: (n,) training text
        block_size: characters in a window (T)
        seed: determines order and offsets
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int) -> None:
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.windows = max(1, (len(tokens) - block_size) // block_size)
        self.offsets = min(block_size, len(tokens) - self.windows * block_size)
        self.view = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)  # (n - T, T + 1), without a copy
        self.cached = range(0)  # samples whose starts are in cached_starts
        self.cached_starts = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.windows

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Returns the position in the text, (n,), at which the window of each sample starts."""
        epoch, index = np.divmod(samples, self.windows)
        offset = hash64(self.seed, epoch, 0) % np.uint64(self.offsets)
        return offset.astype(np.int64) + self.block_size * permute(index, self.windows, hash64(self.seed, epoch, 1))

    def _cached_starts(self, samples: range) -> np.ndarray:
        if not self.cached.start <= samples.start <= samples.stop <= self.cached.stop:
            self.cached = range(samples.start, samples.start + LOOKAHEAD)
            self.cached_starts = self.starts(np.arange(self.cached.start, self.cached.stop))
        return self.cached_starts[samples.start - self.cached.start : samples.stop - self.cached.start]

    def __getitem__(self, samples: int | Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64: (T,) for one sample number, (B, T) for several."""
        if isinstance(samples, (int, np.integer)):
            idx, targets = self[range(int(samples), int(samples) + 1)]
            return idx[0], targets[0]
        if isinstance(samples, range) and samples.step == 1 and len(samples) <= LOOKAHEAD:
            starts = self._cached_starts(samples)
        else:
            starts = self.starts(np.asarray(samples, dtype=np.int64))
        windows = torch.from_numpy(self.view[starts].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


class ValidationDataset(Dataset):
    """The validation text in windows; IGNORE_INDEX fills the targets of the last one.

    Args:
        tokens: (n,) validation text
        block_size: characters in a window (T)
        max_windows: if the text has more windows, so many of them, evenly spread; None: all
    """

    def __init__(self, tokens: np.ndarray, block_size: int, max_windows: int | None = None) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.windows_in_text = math.ceil((len(tokens) - 1) / block_size)
        self.windows = min(self.windows_in_text, max_windows or self.windows_in_text)

    def __len__(self) -> int:
        return self.windows

    def starts(self, windows: range) -> np.ndarray:
        """Returns the position in the text, (B,), at which each of these windows starts."""
        in_text = np.asarray(windows, dtype=np.int64) * self.windows_in_text // self.windows
        return in_text * self.block_size

    def count(self, windows: range) -> int:
        """Returns the number of targets in these windows."""
        targets_left = len(self.tokens) - 1 - self.starts(windows)
        return int(np.minimum(targets_left, self.block_size).sum())

    def __getitem__(self, windows: range) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of B windows, (B, T), int64."""
        positions = self.starts(windows)[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        has_target = positions[:, 1:] < len(self.tokens)
        text = self.tokens[np.minimum(positions, len(self.tokens) - 1)].astype(np.int64)
        idx = np.where(has_target, text[:, :-1], 0)
        targets = np.where(has_target, text[:, 1:], IGNORE_INDEX)
        return torch.from_numpy(idx), torch.from_numpy(targets)
