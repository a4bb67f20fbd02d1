"""An n-gram model of characters, as a yardstick: interpolated modified Kneser-Ney smoothing.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1998. A character's probability
after a context is its discounted count there, plus what the discounts leave times its probability after the context
without its first character, and so on down to 1/V. Counts below the highest order are those of distinct characters
before the n-gram (Kneser and Ney, 1995).
"""

import numpy as np


def kneser_ney(train: np.ndarray, text: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Returns the probability of each character of a text, (n,), each after the `order` - 1 characters before it.

    Args:
        train: (N,) tokens that are counted; order is at most N
        text: (n,) tokens that follow those of `train`, and are not counted
        order: characters in the longest n-grams, at least 1
        vocab_size: number of different tokens (V)
    """
    tokens, N = np.concatenate((train, text)).astype(np.int64), len(train)
    # grams[k][i] numbers the k-gram at i, so that equal ones have equal numbers; its context is the (k-1)-gram at i.
    grams = [np.zeros(len(tokens) + 1, np.int64), tokens]
    for k in range(2, order + 1):
        grams.append(np.unique(grams[-1][:-1] * vocab_size + tokens[k - 1 :], return_inverse=True)[1])
    distinct = [np.unique(gram[: N - k + 1], return_index=True)[1] for k, gram in enumerate(grams)]  # first positions

    probabilities = np.full(len(text), 1 / vocab_size)
    for k in range(1, order + 1):
        gram, context, start = grams[k], grams[k - 1], N - k + 1  # `start`: of the first k-gram that ends in the text
        counted = gram[:start] if k == order else gram[distinct[k + 1] + 1]
        counts = np.bincount(counted, minlength=gram.max() + 1)
        discounts = discount_by_count(counts)[np.minimum(counts, 3)]
        found, before = gram[distinct[k]], context[distinct[k]]
        totals, left = (np.bincount(before, x[found], context.max() + 1) for x in (counts, discounts))
        gram, context = gram[start:], context[start : len(gram)]
        mass = counts[gram] - discounts[gram] + left[context] * probabilities
        seen = totals[context] > 0
        probabilities[seen] = mass[seen] / totals[context][seen]
    return probabilities


def discount_by_count(counts: np.ndarray) -> np.ndarray:
    """Returns Chen and Goodman's discounts of n-grams that are counted 0, 1, 2 and at least 3 times, (4,).

    The numbers of n-grams in their formulas are increased by 1, so that they are defined for any text.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=5)[:5] + 1  # of n-grams that are counted 0, ..., 4 times
    first = n[1] / (n[1] + 2 * n[2])
    rest = [c - (c + 1) * first * n[c + 1] / n[c] for c in (2, 3)]
    return np.array([0, first, *np.clip(rest, first, (2, 3))])
