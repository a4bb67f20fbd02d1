"""The n-gram model: probabilities that sum to 1, contexts that end before the character, and a known entropy."""

import numpy as np
import pytest

from benchmarks.counting import kneser_ney

V = 5


def random_text(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V - 1, size).astype(np.uint8)  # the last token never occurs


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("context", [[0, 1, 2, 3, 0], [3, 3, 3, 3, 3], [0, 1, V - 1, 0, V - 1]])
def test_probabilities_sum_to_1_after_seen_and_unseen_contexts(order: int, context: list[int]) -> None:
    for size in (7, 60, 2000):
        train = random_text(size)
        last = [kneser_ney(train, np.array([*context, token]), order, V)[-1] for token in range(V)]
        assert sum(last) == pytest.approx(1, abs=1e-12)
        assert min(last) > 0


def test_a_probability_depends_on_the_characters_before_it_alone() -> None:
    train, text, order = random_text(2000), random_text(50, seed=1), 4
    probabilities = kneser_ney(train, text, order, V)
    for i in (0, 1, 20):
        np.testing.assert_array_equal(kneser_ney(train, text[: i + 1], order, V), probabilities[: i + 1])
    changed = text.copy()
    changed[20] = (text[20] + 1) % (V - 1)
    differs = kneser_ney(train, changed, order, V) != probabilities
    assert {*np.flatnonzero(differs)} <= {20, 21, 22, 23}
    assert differs[[21, 22, 23]].all()


def test_counts_and_discounts_are_chen_and_goodmans() -> None:
    """By hand, after "aaaba": a follows two characters and b one; aa occurs twice, ab and ba once."""
    train = np.array([0, 0, 0, 1, 0])
    # The numbers of n-grams with count 1, 2 and 3, plus 1: 2, 2, 1 of characters and 3, 2, 1 of bigrams.
    once, bigram_once = 2 / (2 + 2 * 2), 3 / (3 + 2 * 2)
    twice, bigram_twice = (2 - 3 * first * 1 / 2 for first in (once, bigram_once))
    a = (2 - twice + (twice + once) / 2) / 3
    b = (1 - once + (twice + once) / 2) / 3
    assert a + b == pytest.approx(1)
    after_a = (1 - bigram_once + (bigram_twice + bigram_once) * b) / 3
    after_b = 1 - bigram_once + bigram_once * a
    np.testing.assert_allclose(kneser_ney(train, np.array([1, 0]), 2, 2), [after_a, after_b])


def test_the_loss_on_a_markov_chain_is_its_entropy_rate() -> None:
    rng, n = np.random.default_rng(0), 100_000
    transitions = rng.dirichlet(np.full(V, 0.5), V)
    cumulative, draws, states = transitions.cumsum(1), rng.random(n), [0]
    for draw in draws[1:]:
        states.append(min(int(np.searchsorted(cumulative[states[-1]], draw)), V - 1))
    text = np.array(states)
    train, val = text[:80_000], text[80_000:]
    values, vectors = np.linalg.eig(transitions.T)
    stationary = np.real(vectors[:, np.argmax(values.real)])
    entropy = -(stationary / stationary.sum() * (transitions * np.log(transitions)).sum(1)).sum()
    true_loss = -np.log(transitions[text[79_999:-1], val]).mean()
    losses = [-np.log(kneser_ney(train, val, order, V)).mean() for order in (1, 2, 3)]
    assert losses[1] == pytest.approx(entropy, abs=0.02)
    assert -0.0005 < losses[1] - true_loss < 0.001
    assert -0.0005 < losses[2] - true_loss < 0.004
    assert losses[0] > entropy + 0.1
