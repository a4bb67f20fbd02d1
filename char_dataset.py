"""Tokens -> windows -> the order of training samples.

The window of a sample is computed from the seed and the number of the sample, so there is no sampler with a state to
save: a run that knows the number of samples it has trained on continues with the next sample.

Indexed with a range or a list of numbers, both datasets return a batch, as the trainer needs. For other programs they
are map-style datasets: indexed with an int from 0 to len - 1, they return one window.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mingpt.nn.layers import IGNORE_INDEX
from mingpt.text.permutation import hash64, permute


class WindowDataset(Dataset):
    """Windows of a text as a map-style dataset: `dataset[3]` is a window, `dataset[range(3, 9)]` a batch of windows."""

    num_windows: int

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, numbers: int | Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64: (T,) for one number, (B, T) for several.

        Raises:
            IndexError: a single number is not below len; negative numbers count from the end, like in a list.
        """
        if isinstance(numbers, int | np.integer):
            idx, targets = self.batch(np.array([range(self.num_windows)[numbers]]))
            return idx[0], targets[0]
        return self.batch(np.asarray(numbers, dtype=np.int64))

    def batch(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of windows (B,), (B, T) each."""
        raise NotImplementedError


class CharDataset(WindowDataset):
    """Windows of the training text in an endless sequence of samples: sample i belongs to epoch i // len(dataset).

    An epoch cuts the text into `len(dataset)` consecutive windows, and contains each of them once. Epochs differ in the
    order of their windows and in their offset, the position of the first window in the text. With 50 tokens, windows of
    8 tokens and seed 1, for example, the windows of the first samples start at

        epoch 0, samples 0 to 4:    27 19 35 11  3  (offset 3)
        epoch 1, samples 5 to 9:    17  9 33 25  1  (offset 1)
        epoch 2, samples 10 to 14:  24  0  8 32 16  (offset 0)

    `dataset[range(7, 9)]` is a batch of two samples, of any epoch; `dataset[4]` is one sample, of the first epoch.

    Args:
        tokens: (n,) training text, n > block_size; may be a memory map
        block_size: tokens in a window (T)
        seed: determines orders and offsets
    """

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        # All epochs have the same number of windows, whatever their offset, so up to T tokens are not used.
        self.num_windows = max(1, (len(tokens) - block_size) // block_size)
        # Number of possible offsets. The last token is only a target.
        self.num_offsets = min(block_size, len(tokens) - self.num_windows * block_size)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Returns the start of the window of each sample, as a position in the text, (B,)."""
        epoch, index = np.divmod(samples, self.num_windows)
        hashes = hash64(self.seed, epoch, np.arange(2)[:, None])  # (2, B)
        offset = hashes[0] % np.uint64(self.num_offsets)
        window = permute(index, self.num_windows, key=hashes[1])
        return offset.astype(np.int64) + window * self.block_size

    def batch(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of samples (B,), (B, T) each. Targets that are IGNORE_INDEX do not count.

        A change may use random numbers of Python, NumPy or torch: all of them are seeded for each micro-batch, so a
        resumed run reads the same samples. On another number of ranks the micro-batches are others, and so are the
        numbers, like those of dropout. `hash64(self.seed, samples, 2)` has a random integer for each sample that does
        not depend on the other samples of its batch.
        """
        starts = self.starts(samples)
        positions = starts[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        text = torch.from_numpy(self.tokens[positions].astype(np.int64))
        # The target of each token is the next token.
        return text[:, :-1], text[:, 1:]


class ValidationDataset(WindowDataset):
    """Windows of the validation text, in the order of the text.

    The last window of the text may be shorter than the others, and windows after it are empty. Missing targets are
    IGNORE_INDEX.

    Args:
        tokens: (n,) validation text, n > 1
        block_size: tokens in a window (T)
        max_windows: maximum number of windows, evenly spread over the text; None: all windows
    """

    def __init__(self, tokens: np.ndarray, block_size: int, max_windows: int | None = None) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.num_windows_in_text = math.ceil((len(tokens) - 1) / block_size)
        self.num_windows = self.num_windows_in_text
        if max_windows is not None:
            self.num_windows = min(max_windows, self.num_windows_in_text)

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of windows (B,), (B, T) each."""
        window_in_text = windows * self.num_windows_in_text // self.num_windows
        positions = (window_in_text * self.block_size)[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        last = len(self.tokens) - 1
        text = self.tokens[np.minimum(positions, last)].astype(np.int64)
        has_target = positions[:, :-1] < last
        idx = torch.from_numpy(np.where(has_target, text[:, :-1], 0))
        targets = torch.from_numpy(np.where(has_target, text[:, 1:], IGNORE_INDEX))
        return idx, targets
