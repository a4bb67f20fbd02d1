import re

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

from char_dataset import CharDataset, ValidationDataset
from mingpt.nn.layers import IGNORE_INDEX


def test_every_window_once_per_epoch_in_another_order_and_at_another_offset() -> None:
    data = CharDataset(np.arange(1000, dtype=np.uint16), block_size=16, seed=3)
    assert len(data) == (1000 - 16) // 16
    orders, offsets = set(), set()
    for epoch in range(20):
        starts = data.starts(np.arange(epoch * len(data), (epoch + 1) * len(data)))
        assert sorted(starts) == list(range(min(starts), min(starts) + 16 * len(data), 16))
        assert min(starts) < 16
        assert max(starts) + 17 <= 1000
        orders.add(tuple((starts - min(starts)) // 16))
        offsets.add(min(starts))
    assert len(orders) == 20
    assert len(offsets) > 8


def test_a_sample_is_a_function_of_seed_and_number() -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    data, other = CharDataset(tokens, 8, seed=1), CharDataset(tokens, 8, seed=2)
    idx, targets = data[np.array([5, 700, 10**12])]
    assert torch.equal(targets[:, :-1], idx[:, 1:])
    assert torch.equal(idx[:2], CharDataset(tokens, 8, seed=1)[[5, 700]][0])
    assert not torch.equal(other[range(64)][0], data[range(64)][0])
    # Pinned: with another order, existing snapshots would resume with other data.
    assert data.starts(np.array([0, 1, 623, 624, 10**12])).tolist() == [3899, 1259, 2227, 1857, 3772]


@pytest.mark.parametrize("numbers", [range(777, 790), [5, 10**9], [3, 1, 2, 1], np.array([4, 10**12]), range(4097)])
def test_a_batch_holds_the_windows_of_its_samples_in_their_order(numbers: range | list[int] | np.ndarray) -> None:
    data = CharDataset(np.arange(50_000, dtype=np.uint16), block_size=64, seed=1)  # 780 windows
    idx, targets = data[numbers]
    assert idx.dtype == targets.dtype == torch.int64
    expected = data.starts(np.array(numbers))[:, None] + np.arange(65)
    assert np.array_equal(idx, expected[:, :-1])
    assert np.array_equal(targets, expected[:, 1:])


@pytest.mark.parametrize(
    "data",
    [
        CharDataset(np.arange(1000, dtype=np.uint16), 16, seed=1),
        ValidationDataset(np.arange(1000, dtype=np.uint16), 16),  # its last window has 7 targets
    ],
)
def test_both_are_map_style_datasets(data: CharDataset | ValidationDataset) -> None:
    batch = data[range(len(data))]
    loaded = zip(*DataLoader(data, batch_size=5), strict=True)
    assert_close(tuple(map(torch.cat, loaded)), batch)
    assert torch.equal(data[-1][1], batch[1][-1])
    with pytest.raises(IndexError):  # which ends a loop over the windows
        data[len(data)]


def test_no_training_window_holds_validation_text() -> None:
    tokens = np.repeat(np.array([0, 1], np.uint8), (900, 100))
    idx, targets = CharDataset(tokens[:900], 16, seed=0)[range(50 * 900 // 16)]
    assert idx.max() == targets.max() == 0


def test_validation_covers_each_character_once() -> None:
    data = ValidationDataset(np.arange(30, dtype=np.uint8), block_size=8)
    idx, targets = data[range(len(data))]
    assert idx.shape == targets.shape == (4, 8)
    assert targets[targets != IGNORE_INDEX].tolist() == list(range(1, 30))
    assert idx[targets != IGNORE_INDEX].tolist() == list(range(29))
    assert (targets != IGNORE_INDEX).sum(1).tolist() == [8, 8, 8, 5]


def test_a_part_of_the_validation_windows_is_evenly_spread() -> None:
    tokens = np.arange(83, dtype=np.uint8)  # 11 windows of 8, the last one of 2
    part, whole = ValidationDataset(tokens, 8, max_windows=4), ValidationDataset(tokens, 8)
    assert (len(part), len(whole)) == (4, 11)
    assert (part[range(4)][1] != IGNORE_INDEX).all()
    assert_close(part[range(4)], whole[[0, 2, 5, 8]])
    for max_windows in (11, 12, None):
        assert_close(ValidationDataset(tokens, 8, max_windows)[range(11)], whole[range(11)])


def test_the_docstring_shows_the_windows_of_three_epochs() -> None:
    data = CharDataset(np.arange(50), block_size=8, seed=1)
    rows = re.findall(r"epoch (\d), samples (\d+) to (\d+):([\d ]+)\(offset (\d)\)", CharDataset.__doc__ or "")
    assert [int(epoch) for epoch, *_ in rows] == [0, 1, 2]
    for epoch, first, last, starts, offset in rows:
        samples = np.arange(int(first), int(last) + 1)
        assert len(samples) == len(data)
        assert set(samples // len(data)) == {int(epoch)}
        assert data.starts(samples).tolist() == [int(start) for start in starts.split()]
        assert data.starts(samples).min() == int(offset)
