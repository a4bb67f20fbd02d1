"""Text -> training and validation part -> windows -> the order of training samples.

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

from mingpt.config.schema import DataConfig
from mingpt.errors import UserError
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.text.permutation import hash64, permute


def train_val_split(tokens: np.ndarray, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Splits the tokens of a text into the training part, which comes first, and the validation part.

    Raises:
        UserError: a part is shorter than a window and its last target.
    """
    if config.truncate is not None:
        tokens = tokens[: round(len(tokens) * config.truncate)]
    train_length = int(len(tokens) * config.train_split)
    train = tokens[:train_length]
    val = tokens[train_length:]
    for name, part in (("training", train), ("validation", val)):
        if len(part) < config.block_size + 1:
            raise UserError(
                f"data.block_size: the {name} part of {config.path} has {len(part)} tokens, but a window needs "
                f"block_size + 1 = {config.block_size + 1}; lower data.block_size, change data.train_split "
                f"({config.train_split}) or use more text"
            )
    return train, val


class CharDataset(Dataset):
    """Windows of the training text in an endless sequence of samples: sample i belongs to epoch i // len(dataset).

    An epoch cuts the text into `len(dataset)` consecutive windows, and contains each of them once. Epochs differ in the
    order of their windows and in their offset, the position of the first window in the text. `dataset[range(7, 9)]`
    is a batch of two samples, of any epoch; `dataset[7]` is a sample of the first epoch.

    Args:
        tokens: (n,) training text, n > block_size
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

    def __len__(self) -> int:
        """Returns the number of windows in an epoch."""
        return self.num_windows

    def num_targets(self, samples: range) -> int:
        """Returns the number of targets of these samples, without IGNORE_INDEX; micro-batches weigh as many."""
        return len(samples) * self.block_size

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Returns the start of the window of each sample, as a position in the text, (B,)."""
        epoch, index = np.divmod(samples, self.num_windows)
        offset = hash64(self.seed, epoch, 0) % np.uint64(self.num_offsets)
        window = permute(index, self.num_windows, key=hash64(self.seed, epoch, 1))
        return offset.astype(np.int64) + window * self.block_size

    def __getitem__(self, samples: int | Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64: (T,) for one sample number, (B, T) for several.

        Raises:
            IndexError: a single number is not in the first epoch; negative numbers count from its end, like in a list.
        """
        if isinstance(samples, int | np.integer):
            [idx], [targets] = self[[range(self.num_windows)[samples]]]
            return idx, targets
        starts = self.starts(np.asarray(samples, dtype=np.int64))
        positions = starts[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        text = torch.from_numpy(self.tokens[positions].astype(np.int64))
        # The target of each token is the next token.
        return text[:, :-1], text[:, 1:]


class ValidationDataset(Dataset):
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

    def __len__(self) -> int:
        return self.num_windows

    def starts(self, windows: Sequence[int]) -> np.ndarray:
        """Returns the start of each window, as a position in the text, (B,)."""
        window_in_text = np.asarray(windows, dtype=np.int64) * self.num_windows_in_text // self.num_windows
        return window_in_text * self.block_size

    def num_targets(self, windows: range) -> int:
        """Returns the number of targets of these windows, without IGNORE_INDEX."""
        targets_left = len(self.tokens) - 1 - self.starts(windows)
        return int(targets_left.clip(0, self.block_size).sum())

    def __getitem__(self, windows: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64: (T,) for one window, (B, T) for several.

        Raises:
            IndexError: a single number is not below len; negative numbers count from the end, like in a list.
        """
        if isinstance(windows, int | np.integer):
            [idx], [targets] = self[[range(self.num_windows)[windows]]]
            return idx, targets
        positions = self.starts(windows)[:, None] + np.arange(self.block_size + 1)  # (B, T + 1)
        last = len(self.tokens) - 1
        text = self.tokens[np.minimum(positions, last)].astype(np.int64)
        has_target = positions[:, :-1] < last
        idx = torch.from_numpy(np.where(has_target, text[:, :-1], 0))
        targets = torch.from_numpy(np.where(has_target, text[:, 1:], IGNORE_INDEX))
        return idx, targets


def check_num_targets(data: CharDataset | ValidationDataset) -> None:
    """Raises a ValueError if `num_targets` is wrong at either end of an epoch, for a batch or for each of its samples.

    Losses would get wrong weights silently.
    """
    numbers = range(len(data))
    for batch in (numbers[:16], numbers[-16:]):
        for samples in (batch, *(batch[i : i + 1] for i in range(len(batch)))):
            _, targets = data[samples]
            found = int((targets != IGNORE_INDEX).sum())
            counted = data.num_targets(samples)
            if found != counted:
                raise ValueError(
                    f"{type(data).__name__}: samples {samples[0]} to {samples[-1]} have {found} targets other than "
                    f"IGNORE_INDEX, but num_targets returns {counted}"
                )
        if sum(data.num_targets(batch[i : i + 1]) for i in range(len(batch))) != data.num_targets(batch):
            raise ValueError(
                f"{type(data).__name__}: num_targets of samples {batch[0]} to {batch[-1]} depends on the other samples "
                "of their batch, which differ between numbers of ranks and sizes of micro-batches"
            )
