"""Pseudorandom numbers, and permutations of range(n) that are computed for single indices, without a table."""

import math

import numpy as np

ROUNDS = 8


def hash64(*values: int | np.ndarray) -> np.ndarray:
    """Hashes integers to uniform 64-bit integers, elementwise, with splitmix64's finalizer (Steele et al., 2014)."""
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = (state ^ np.asarray(value).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Maps each index to its position in a permutation of range(size) that the key selects.

    A Feistel network permutes pairs (left, right) of numbers below `side`, the square root of size rounded up. Such a
    pair is a number below side * side. A result that is not below size is mapped again until it is ("cycle walking").
    Each round is invertible, so no two indices get the same position. Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002.

    Args:
        index: (n,) integers in [0, size)
        size: at least 1
        key: (n,) uint64, the key of the permutation for each index

    Returns:
        (n,) int64
    """
    # All integers are uint64, since NumPy turns a mixture of uint64 and int64 into floating-point numbers.
    side = np.uint64(math.isqrt(size - 1) + 1)
    round_keys = hash64(key, np.arange(ROUNDS)[:, None])  # (ROUNDS, n)
    position = index.astype(np.uint64)
    is_outside = np.ones(len(position), dtype=bool)
    while is_outside.any():
        left, right = np.divmod(position, side)
        for round_key in round_keys:
            shift = hash64(round_key ^ right) % side
            left, right = right, (left + shift) % side
        position = np.where(is_outside, left * side + right, position)
        is_outside = position >= size
    return position.astype(np.int64)
