"""Text becomes tokens and text again, and the vocabulary of a snapshot is enough for both."""

import pytest

from mingpt.errors import UserError
from mingpt.text.tokenizer import Tokenizer

PARTS = ["does bob eat\n", "figs? – “Não”, 🙂", "eat bob\r\n"]  # with new characters late and out of order


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A tokenizer that has learned PARTS."""
    learned = Tokenizer()
    for part in PARTS:
        learned.learn(part)
    learned.sort()
    return learned


def test_encoded_text_is_decoded_to_the_same_text(tokenizer: Tokenizer) -> None:
    text = PARTS[1] + PARTS[0]
    tokens = tokenizer.encode(text, "prompt")
    assert tokenizer.decode(tokens) == text
    assert tokens == tokenizer.learn(text).tolist()
    with pytest.raises(
        UserError, match=r"^--prompt: the tokens 'X\\udcff' \(2 distinct\) are not in the training text's vocabulary, '"
    ):
        tokenizer.encode("eat X\udcff figs", "--prompt")


def test_the_vocabulary_of_a_snapshot_rebuilds_the_tokenizer(tokenizer: Tokenizer) -> None:
    rebuilt = Tokenizer(tokenizer.vocabulary)
    for part in PARTS:
        assert rebuilt.encode(part, "prompt") == tokenizer.encode(part, "prompt")
        assert rebuilt.learn(part).tolist() == tokenizer.learn(part).tolist()
    assert rebuilt.vocabulary == tokenizer.vocabulary
