"""Text <-> tokens: characters, or the tokens of a tokenizer.json. The last line selects the tokenizer of text files.

A tokenizer has the attributes and methods of CharTokenizer.
"""

import json
import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import fsspec
import numpy as np

from mingpt.errors import UserError
from mingpt.text.files import readable

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # tokens of GPT-2, Llama 3, Llama 2 and Gemma
ADDING = ("truncation", "padding", "post_processor")  # parts of a tokenizer.json that add or remove tokens of a text


class CharTokenizer:
    """A token for each distinct character.

    Attributes:
        vocabulary: the characters in the order of their tokens
        vocab_size: number of tokens
        end_of_text: what ends documents and nothing else; None: there is no such token in the training text
        document_end: what ends a document in a text of several
        default_prompt: what a sample continues
    """

    def __init__(self, vocabulary: str = "", end_of_text: str | None = None) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.end_of_text = end_of_text
        self.document_end = "\n"
        self.default_prompt = end_of_text or vocabulary[:1]  # usually a line break

    def extended(self, characters: Iterable[str]) -> "CharTokenizer":
        """Returns a tokenizer with the new characters of a training text, which may have other tokens."""
        return CharTokenizer("".join(sorted({*self.vocabulary, *characters})))

    @cached_property
    def _token_of_code(self) -> np.ndarray:
        tokens = np.full(sys.maxunicode + 1, -1, dtype=np.int32)
        tokens[_code_points(self.vocabulary)] = range(self.vocab_size)
        return tokens

    def encode(self, text: str, source: str) -> np.ndarray:
        """Returns the tokens of a text, (n,).

        Args:
            source: option or key of the text, for the message

        Raises:
            UserError: a character is not in the vocabulary.
        """
        tokens = self._token_of_code[_code_points(text)]
        if tokens.min(initial=0) < 0:
            raise UserError(
                f"{source}: the tokens {show_tokens({*text} - {*self.vocabulary})} are not in the training text's "
                f"vocabulary, {show_tokens(self.vocabulary)}"
            )
        return tokens

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


class JSONTokenizer:
    """The tokenizer of a tokenizer.json, like GPT-2's, in Hugging Face's tokenizers. It adds no tokens to a text.

    It has the attributes and methods of CharTokenizer, except that `vocabulary` is a list of strings.

    Raises:
        ImportError: tokenizers is not installed.
        Exception: the text is not a tokenizer.json; tokenizers raises nothing narrower.
    """

    def __init__(self, text: str, end_of_text: str | None = None) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - optional

        self.text = json.dumps(json.loads(text) | dict.fromkeys(ADDING), ensure_ascii=False)
        self.tokenizer = Tokenizer.from_str(self.text)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.vocabulary = [self.tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        self.end_of_text = end_of_text
        self.document_end = end_of_text or END_OF_TEXT[0]
        self.default_prompt = end_of_text or "\n"

    def extended(self, characters: Iterable[str]) -> "JSONTokenizer":
        return self  # its vocabulary is fixed

    def encode(self, text: str, source: str) -> np.ndarray:
        return self.encode_batch([text], source)[0]

    def encode_batch(self, pieces: Sequence[str], source: str) -> list[np.ndarray]:
        """Returns the tokens of each piece of a text. Names of special tokens in it are these tokens."""
        # It computes no positions, and is new in tokenizers 0.20.
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        with readable("a text", source):
            return [np.array(encoding.ids, np.int32) for encoding in encode(pieces, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def to_json(self) -> str:
        return self.text


Tokenizer = CharTokenizer | JSONTokenizer


def snapshot_entries(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what a snapshot contains, for `restore_tokenizer`."""
    return {
        "vocabulary": tokenizer.vocabulary if isinstance(tokenizer.vocabulary, str) else "",
        "tokenizer": tokenizer.to_json(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
    }


@cache  # weights, snapshot and token files may have the same one; GPT-2's takes 0.13 s
def parse_tokenizer(text: str, end_of_text: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json. Characters do not need Hugging Face's tokenizers.

    Args:
        end_of_text: what ends a document

    Raises:
        Exception: the text is not a tokenizer.json, or tokenizers is not installed.
    """
    model = json.loads(text)["model"]
    if model.get("type") == "WordLevel":  # GPT-2's own file is older than this key
        characters = sorted(model["vocab"], key=model["vocab"].get)
        if max(map(len, characters)) == 1:
            return TextTokenizer("".join(characters), end_of_text)
    return JSONTokenizer(text, end_of_text)


def read_tokenizer(path: str, end_of_text: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json, or of a folder that has one; may be a URL.

    Args:
        end_of_text: what ends documents; None: one of END_OF_TEXT, or `eos_token` of a tokenizer_config.json beside it

    Raises:
        Exception: it can't be read, or tokenizers is not installed.
    """
    fs, name = fsspec.url_to_fs(path)
    if fs.isdir(name):
        name = f"{name}/tokenizer.json"
    text = fs.cat_file(name).decode()
    end_of_text = end_of_text or next((token for token in END_OF_TEXT if json.dumps(token) in text), None)
    config = f"{name.rpartition('/')[0]}/tokenizer_config.json"
    if end_of_text is None and fs.exists(config):
        eos_token = json.loads(fs.cat_file(config)).get("eos_token")
        end_of_text = eos_token["content"] if isinstance(eos_token, dict) else eos_token
    tokenizer = parse_tokenizer(text, end_of_text)
    if end_of_text is not None and end_of_text not in tokenizer.vocabulary:
        raise UserError(f"{path}: {end_of_text}, the end of a document, is no token of it; name one by --end_of_text")
    return tokenizer


def restore_tokenizer(header: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a snapshot; raises a UserError if tokenizers is not installed."""
    with readable("its tokenizer", "snapshot"):
        return parse_tokenizer(header["tokenizer"], header["end_of_text"])


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
