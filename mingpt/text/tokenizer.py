"""Text <-> tokens. The last line selects the tokenizer of the program."""

import reprlib
import sys
from collections.abc import Collection, Iterable

import numpy as np

from mingpt.errors import UserError


class CharTokenizer:
    """A token for each distinct character.

    Attributes:
        vocabulary: the strings of the tokens; the index of a string is its token. Snapshots contain the vocabulary, and
            `CharTokenizer(vocabulary)` rebuilds the tokenizer. A tokenizer with longer strings uses a list of strings.
        is_fixed: whether a text has been read, whose tokens would be wrong if the vocabulary changed
    """

    def __init__(self, vocabulary: str = "") -> None:
        self.is_fixed = False
        self.token_of_code = np.full(sys.maxunicode + 1, -1, dtype=np.int32)  # the index is the code point
        self.set_vocabulary(vocabulary)

    def set_vocabulary(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.token_of_code[list(map(ord, vocabulary))] = range(len(vocabulary))

    def learn(self, text: str) -> np.ndarray:
        """Returns the tokens of a part of the training text, (n,), and adds its new characters to the vocabulary.

        Raises:
            UserError: a character is new, but the vocabulary is fixed.
        """
        # UTF-32 is an array of code points. NumPy is faster than a set or a dictionary of characters.
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        tokens = self.token_of_code.take(codes)
        if tokens.min() < 0:
            new = "".join(map(chr, np.unique(codes[tokens < 0])))
            if self.is_fixed:
                raise UserError(
                    f"data.path: the tokens {show_tokens(new)} of another text are not in the training text's "
                    f"vocabulary, {show_tokens(self.vocabulary)}; leave them out, or train on a text that has them"
                )
            self.set_vocabulary(self.vocabulary + new)
            tokens = self.token_of_code.take(codes)
        return tokens

    def sort(self) -> np.ndarray:
        """Sorts and fixes the vocabulary after the last part of the training text.

        Returns:
            the new token of each token, (V,)
        """
        self.is_fixed = True
        order = np.argsort(list(self.vocabulary))
        self.set_vocabulary("".join(sorted(self.vocabulary)))
        return np.argsort(order)

    def encode(self, text: str, source: str) -> list[int]:
        """Returns the tokens of a short text, such as a prompt.

        Args:
            source: option or key of the text, for the message

        Raises:
            UserError: a character is not in the vocabulary.
        """
        unknown = set(text) - set(self.vocabulary)
        if unknown:
            raise UserError(
                f"{source}: the tokens {show_tokens(unknown)} are not in the training text's vocabulary, "
                f"{show_tokens(self.vocabulary)}"
            )
        return [self.vocabulary.index(character) for character in text]

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens."""
        return "".join(self.vocabulary[token] for token in tokens)


def show_tokens(tokens: Collection[str]) -> str:
    """Formats distinct tokens for a message: a few of them, and their number."""
    return f"{reprlib.repr(''.join(sorted(tokens)))} ({len(tokens):,} distinct)"


Tokenizer = CharTokenizer
