"""Text becomes tokens and text again, and the vocabulary of a snapshot is enough for both."""

from mingpt.text.tokenizer import Tokenizer


def test_the_vocabulary_of_a_snapshot_rebuilds_the_tokenizer() -> None:
    """New characters are late and out of order."""
    learned = Tokenizer()
    parts = ["does bob eat\n", "figs? – “Não”, 🙂", "eat bob\r\n"]
    for part in parts:
        learned.learn(part)
    learned.sort()
    rebuilt = Tokenizer(learned.vocabulary)
    text = parts[1] + parts[0] + parts[2]
    tokens = learned.encode(text, "prompt")
    assert learned.decode(tokens) == rebuilt.decode(tokens) == text
    assert tokens == rebuilt.encode(text, "prompt") == learned.learn(text).tolist() == rebuilt.learn(text).tolist()
    assert rebuilt.vocabulary == learned.vocabulary
