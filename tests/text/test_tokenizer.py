import json
import sys

import pytest

from mingpt.errors import UserError
from mingpt.text.tokenizer import (
    CharTokenizer,
    JSONTokenizer,
    parse_tokenizer,
    restore_tokenizer,
    snapshot_entries,
    stream_text,
)
from tests.inside import byte_pair_tokenizer, hub_form

TEXT = "naïve – “quoted” 🙂🏽 text,\n\n  ünd 日本語 \ufffd!"


def llama_tokenizer() -> JSONTokenizer:
    """A tokenizer like Llama 2's, which decodes the first word of a text without the blank before it."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = ["▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = tokenizers.models.BPE(dict(zip(words, range(len(words)), strict=True)), [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return JSONTokenizer(tokenizer.to_str())


def test_text_is_yielded_as_soon_as_its_bytes_are_complete() -> None:
    tokenizer = byte_pair_tokenizer("some other text", 260)
    tokens = tokenizer.encode(TEXT, "test").tolist()
    assert len(tokens) > len(TEXT)  # a token for each byte of the characters beyond ASCII
    parts = list(stream_text(tokenizer, [1], tokens))
    assert "".join(parts) == TEXT == tokenizer.decode(tokens)
    single = [part for part in parts if len(part) == 1]
    assert set(single) > {*"ï–“🙂🏽ü日"}
    assert parts[-2:] == ["\ufffd!", ""]  # a replacement character looks like an incomplete one
    assert list(stream_text(tokenizer, [1], tokens[:3])) == ["n", "a", "\ufffd"]  # the first byte of ï


def test_a_blank_before_a_word_is_not_lost() -> None:
    tokenizer = llama_tokenizer()
    tokens = [0, 1, 2, 0, 3 + 0xC3, 3 + 0xAF, 1]
    assert tokenizer.decode(tokens) == "a bc aï b"
    assert list(stream_text(tokenizer, tokens[:1], tokens[1:])) == [" b", "c", " a", "ï", " b", ""]


def test_characters_in_a_tokenizer_json_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = CharTokenizer().extended(TEXT)
    found = parse_tokenizer(tokenizer.to_json())
    assert isinstance(found, CharTokenizer)
    assert found.vocabulary == tokenizer.vocabulary
    with pytest.raises(UserError, match=r"snapshot: .*; run `pip install tokenizers`"):
        restore_tokenizer({"tokenizer": '{"model": {"type": "BPE"}}', "end_of_text": None})


def test_a_snapshot_rebuilds_the_tokenizer_without_what_adds_or_removes_tokens() -> None:
    tokenizer = byte_pair_tokenizer(TEXT * 3, 270)
    content = json.loads(hub_form(tokenizer))
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    changed = JSONTokenizer(json.dumps(content))
    assert json.loads(changed.to_json())["truncation"] is None  # export.py writes it
    assert changed.tokenizer.encode(TEXT).ids == tokenizer.encode(TEXT, "test").tolist()
    for each in (tokenizer, changed):
        rebuilt = restore_tokenizer(snapshot_entries(each))
        assert rebuilt.vocabulary == tokenizer.vocabulary
        assert rebuilt.vocab_size == 270
        assert rebuilt.decode(rebuilt.encode(TEXT, "test")) == TEXT


def test_characters_that_transformers_has_saved_again_are_characters() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    saved = tokenizers.Tokenizer.from_str(CharTokenizer().extended(TEXT).to_json()).to_str(pretty=True)
    assert isinstance(parse_tokenizer(saved), CharTokenizer)
