"""Text <-> tokens: characters, or the tokens of a tokenizer.json. The last line selects the tokenizer of text files.

A tokenizer has `vocabulary`, `vocab_size` and `default_prompt`, and the methods of CharTokenizer.
"""

import json
import re
import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from mingpt.errors import UserError
from mingpt.text.files import readable

PIECE_SIZE = 1 << 14  # characters of a long text that are encoded at once
BATCH_SIZE = 256  # pieces that all cores encode together; their tokens take some 100 MB
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # tokens of GPT-2, Llama 3, Llama 2 and Gemma
LAST_WORD = re.compile(r"(?s).*\S(?=\s\S)")  # up to the last word that is followed by one blank and another word


class CharTokenizer:
    """A token for each distinct character.

    Attributes:
        vocabulary: the characters in the order of their tokens; `CharTokenizer(vocabulary)` rebuilds the tokenizer
    """

    def __init__(self, vocabulary: str = "") -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.default_prompt = vocabulary[:1]  # usually a line break
        self.end_of_text: str | None = None  # see JSONTokenizer

    def extended(self, text: str) -> "CharTokenizer":
        """Returns a tokenizer with the new characters of a training text, which may have other tokens."""
        return CharTokenizer("".join(sorted({*self.vocabulary, *text})))

    def encode(self, text: str, source: str) -> np.ndarray:
        """Returns the tokens of a text, (n,), as the smallest unsigned integers.

        Args:
            source: option or key of the text, for the message

        Raises:
            UserError: a character is not in the vocabulary.
        """
        if unknown := {*text} - {*self.vocabulary}:
            raise UserError(
                f"{source}: the tokens {show_tokens(unknown)} are not in the training text's vocabulary, "
                f"{show_tokens(self.vocabulary)}"
            )
        token_of_code = np.zeros(sys.maxunicode + 1, dtype=np.min_scalar_type(self.vocab_size - 1))
        token_of_code[_code_points(self.vocabulary)] = range(self.vocab_size)
        return token_of_code[_code_points(text)]

    def encode_batch(self, pieces: Sequence[str], source: str) -> list[np.ndarray]:
        """Returns the tokens of each piece of a text."""
        return [self.encode(piece, source) for piece in pieces]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns the text of tokens."""
        codes = _code_points(self.vocabulary)
        return codes[np.asarray(tokens, dtype=np.int64)].tobytes().decode("utf-32-le")

    def to_json(self) -> str:
        """Returns a tokenizer.json, from which Hugging Face's tokenizers builds an equal tokenizer."""
        model = {
            "type": "WordLevel",
            "vocab": {character: token for token, character in enumerate(self.vocabulary)},
            "unk_token": "",  # not in the vocabulary: unknown characters raise an error
        }
        splitter = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        parts = {"added_tokens": [], "pre_tokenizer": splitter, "decoder": {"type": "Fuse"}, "model": model}
        return json.dumps({"version": "1.0"} | parts, ensure_ascii=False)

    def snapshot_entries(self) -> dict[str, Any]:
        """Returns what a snapshot contains, for `restore_tokenizer`."""
        return {"vocabulary": self.vocabulary, "tokenizer": None, "vocab_size": self.vocab_size}


class JSONTokenizer:
    """The tokenizer of a tokenizer.json, like GPT-2's, in Hugging Face's tokenizers.

    Attributes:
        vocabulary: the strings of the tokens, in the order of their numbers
        end_of_text: the token after a document, one of END_OF_TEXT; None: the tokenizer has none

    Raises:
        ImportError: tokenizers is not installed.
        Exception: the text is not a tokenizer.json; tokenizers raises nothing narrower.
    """

    default_prompt = "\n"

    def __init__(self, text: str) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - optional

        self.tokenizer = Tokenizer.from_str(text)
        self.text = text
        if self.tokenizer.truncation or self.tokenizer.padding:
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            self.text = self.tokenizer.to_str()
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.vocabulary = [self.tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        self.end_of_text = next((token for token in END_OF_TEXT if token in self.vocabulary), None)

    def extended(self, text: str) -> "JSONTokenizer":
        return self  # its vocabulary is fixed

    def encode(self, text: str, source: str) -> np.ndarray:
        return np.concatenate(self.encode_batch(list(cut([text])) or [""], source))

    def encode_batch(self, pieces: Sequence[str], source: str) -> list[np.ndarray]:
        """Returns the tokens of each piece of a text. Names of special tokens in it are these tokens."""
        encodings = self.tokenizer.encode_batch(pieces, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.min_scalar_type(self.vocab_size - 1)) for encoding in encodings]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def to_json(self) -> str:
        return self.text

    def snapshot_entries(self) -> dict[str, Any]:
        return {"vocabulary": "", "tokenizer": self.text, "vocab_size": self.vocab_size}


Tokenizer = CharTokenizer | JSONTokenizer


@cache  # weights, snapshot and token files may have the same one; GPT-2's takes 0.13 s
def parse_tokenizer(text: str) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json. Characters do not need Hugging Face's tokenizers.

    Raises:
        Exception: the text is not a tokenizer.json, or tokenizers is not installed.
    """
    model = json.loads(text)["model"]
    if model["type"] == "WordLevel":
        characters = sorted(model["vocab"], key=model["vocab"].get)
        if max(map(len, characters)) == 1:
            return CharTokenizer("".join(characters))
    return JSONTokenizer(text)


def restore_tokenizer(header: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a snapshot; raises a UserError if tokenizers is not installed."""
    if header["tokenizer"] is None:
        return TextTokenizer(header["vocabulary"])
    with readable("its tokenizer", "snapshot"):
        return parse_tokenizer(header["tokenizer"])


def cut(chunks: Iterable[str]) -> Iterator[str]:
    """Cuts a text, which comes in chunks, into pieces of PIECE_SIZE. No token of GPT-2's rules crosses their ends."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        while len(rest) > PIECE_SIZE:
            word = LAST_WORD.match(rest, 0, PIECE_SIZE)
            end = word.end() if word else PIECE_SIZE
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of tokens after a prompt, each part as soon as its last character has all of its bytes.

    Some tokenizers decode a token differently at the start of a text, so each part is decoded after the one before.
    """
    context = list(prompt)
    part: list[int] = []
    for token in tokens:
        part.append(token)
        before = tokenizer.decode(context)
        text = tokenizer.decode(context + part)
        if not text.endswith("\ufffd"):  # which stands for an incomplete character
            yield text[len(before) :]
            context = part
            part = []
    yield tokenizer.decode(context + part)[len(tokenizer.decode(context)) :]


def show_tokens(tokens: Collection[str]) -> str:
    """Formats distinct tokens for a message: a few of them, and their number."""
    return f"{reprlib.repr(''.join(sorted(tokens)))} ({len(tokens):,} distinct)"


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


TextTokenizer = CharTokenizer
