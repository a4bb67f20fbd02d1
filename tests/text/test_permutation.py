"""Permutations without a table."""

import numpy as np
import pytest

from mingpt.text.permutation import hash64, permute


@pytest.mark.parametrize("size", [1, 2, 3, 10, 257, 10_007])
def test_permute_is_a_permutation(size: int) -> None:
    for key in (0, 1, 2**63):
        index = np.arange(size)
        assert sorted(permute(index, size, np.full(size, key, dtype=np.uint64))) == list(range(size))


def test_permutations_look_random() -> None:
    """Over many keys, all positions of an index are equally frequent, and so are the distances between neighbors."""
    size, keys = 12, 24_000
    index, key = np.tile(np.arange(size), keys), np.repeat(hash64(np.arange(keys)), size)
    positions = permute(index, size, key).reshape(keys, size)
    counts = np.stack([np.bincount(positions[:, i], minlength=size) for i in range(size)])
    expected = keys / size
    assert (np.abs(counts - expected) < 6 * expected**0.5).all()
    distances = np.bincount((positions[:, 1] - positions[:, 0]) % size, minlength=size)
    assert distances[0] == 0
    assert (np.abs(distances[1:] - keys / (size - 1)) < 6 * (keys / (size - 1)) ** 0.5).all()


def test_a_large_range_needs_no_table() -> None:
    size = 10**15 + 37
    index = np.append(np.arange(1000), size - 1)
    positions = permute(index, size, np.full(len(index), 7, dtype=np.uint64))
    assert len(set(positions)) == len(index)
    assert 0 <= positions.min() < size / 100
    assert size * 0.99 < positions.max() < size
