"""What is sample number i? Corpus -> windows -> global sample order.

Which window of the text sample i is, is a pure function of (seed, i), so there is no sampler state to save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from mingpt.config import DataConfig
from mingpt.corpus import Corpus
from mingpt.utils.errors import UserError

AHEAD = 4096  # samples whose windows are found at once; they are read when they are asked for
IGNORE_INDEX = -1  # target of a position that has no next character; GPT's loss leaves it out


def train_val_split(corpus: Corpus, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """The training part and the validation part of the text: the first ones and the last ones of its tokens.

    Raises:
        UserError: either part is shorter than one window and its last target.
    """
    used = corpus.tokens[: round(len(corpus.tokens) * (config.truncate or 1))]
    cut = int(len(used) * config.train_split)
    for name, part in (("training", used[:cut]), ("validation", used[cut:])):
        if len(part) < config.block_size + 1:
            raise UserError(
                f"data.block_size: the {name} part of {config.path} has {len(part)} characters, "
                f"a window needs block_size + 1 = {config.block_size + 1}; lower data.block_size, move "
                f"data.train_split ({config.train_split}) or use more text"
            )
    return used[:cut], used[cut:]


def hash64(*words: int | np.ndarray) -> np.ndarray:
    """Mixes integers into well-spread 64-bit ones, elementwise (splitmix64's finaliser; Steele et al., 2014)."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = (state ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where a keyed permutation of range(size) sends `index`: no table, each index on its own.

    An eight-round Feistel network on the square that just covers the range; what falls outside walks on until it is
    inside (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        index: (n,) integers in [0, size)
        size: how many there are
        key: (n,) uint64, the permutation to use for each
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    index = index.astype(np.uint64)
    walking = np.arange(len(index))
    while len(walking):
        left, right = np.divmod(index[walking], side)
        for round_number in range(8):
            left, right = right, (left + hash64(key[walking], round_number, right) % side) % side
        index[walking] = left * side + right
        walking = walking[index[walking] >= size]
    return index.astype(np.int64)


class CharDataset(Dataset):
    """Training windows, numbered without end: sample i is window i % len of epoch i // len.

    Each epoch shows each window once, in its own order and cut at its own offset. `dataset[7]` is one sample,
    `dataset[numbers]` a batch in one indexing operation.

    Args:
        tokens: (n,) training text
        block_size: characters in a window (T)
        seed: orders differ between seeds
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int) -> None:
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.windows = max(1, (len(tokens) - block_size) // block_size)
        self.all_windows = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)  # (n - T, T + 1), no copies
        self.known = range(0)  # samples whose starts are in known_starts
        self.known_starts = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.windows

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """(n,) sample numbers -> (n,) position in the text at which each window starts."""
        epoch, index = np.divmod(numbers, self.windows)
        offset = hash64(self.seed, epoch, 0) % np.uint64(self._offsets())
        return offset.astype(np.int64) + self.block_size * permute(index, self.windows, hash64(self.seed, epoch, 1))

    def _offsets(self) -> int:
        return min(self.block_size, len(self.tokens) - self.windows * self.block_size)

    def _starts_ahead(self, numbers: range) -> np.ndarray:
        """What `starts` says, computed once for the many samples to come: a dozen take as long as thousands."""
        if not self.known.start <= numbers.start <= numbers.stop <= self.known.stop:
            self.known = range(numbers.start, numbers.start + AHEAD)
            self.known_starts = self.starts(np.arange(self.known.start, self.known.stop))
        return self.known_starts[numbers.start - self.known.start : numbers.stop - self.known.start]

    def __getitem__(self, numbers: int | Sequence[int] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample numbers, (B,) or one alone -> inputs and targets, (B, T) or (T,), int64."""
        one = isinstance(numbers, (int, np.integer))
        asked = range(numbers, numbers + 1) if one else numbers  # type: ignore[arg-type, operator]
        if isinstance(asked, range) and asked.step == 1 and len(asked) <= AHEAD:
            starts = self._starts_ahead(asked)
        else:
            starts = self.starts(np.asarray(asked, dtype=np.int64))
        windows = torch.from_numpy(self.all_windows[starts].astype(np.int64))
        if one:
            windows = windows[0]
        return windows[..., :-1], windows[..., 1:]


class ValidationDataset(Dataset):
    """The validation text from end to end, in windows that do not overlap; IGNORE fills the last one's targets.

    Args:
        tokens: (n,) validation text
        block_size: characters in a window (T)
    """

    def __init__(self, tokens: np.ndarray, block_size: int) -> None:
        self.tokens, self.block_size = tokens, block_size

    def __len__(self) -> int:
        return math.ceil((len(self.tokens) - 1) / self.block_size)

    def count(self, windows: range) -> int:
        """How many characters are predicted in these windows."""
        return min(windows.stop * self.block_size, len(self.tokens) - 1) - windows.start * self.block_size

    def __getitem__(self, windows: range) -> tuple[torch.Tensor, torch.Tensor]:
        """B consecutive windows -> inputs and targets, (B, T), int64."""
        size = len(windows) * self.block_size
        text = self.tokens[windows.start * self.block_size : windows.stop * self.block_size + 1].astype(np.int64)
        idx, targets = torch.zeros(size, dtype=torch.int64), torch.full((size,), IGNORE_INDEX)
        idx[: len(text) - 1] = torch.from_numpy(text[:-1])
        targets[: len(text) - 1] = torch.from_numpy(text[1:])
        return idx.view(-1, self.block_size), targets.view(-1, self.block_size)
