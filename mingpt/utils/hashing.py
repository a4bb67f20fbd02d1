"""Hashing of integers, from which all random choices of training data and dropout derive."""

import numpy as np


def hash64(*values: int | np.ndarray) -> np.ndarray:
    """Mixes integers into uniform 64-bit ones, elementwise, by splitmix64's finalizer (Steele et al., 2014)."""
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = (state ^ np.asarray(value).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
