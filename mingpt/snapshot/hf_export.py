"""Converts a snapshot to a model and a tokenizer of Hugging Face transformers."""

from contextlib import suppress

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel, TokenizersBackend

from mingpt.errors import UserError
from mingpt.snapshot.hf_format import EMBEDDINGS, to_transformers
from mingpt.snapshot.load import Pretrained
from mingpt.text.tokenizer import JSONTokenizer

MAX_DIFFERENCE = 1e-3  # between logits; rounding errors are 1e-5 with logits up to 15


class PreTrainedTokenizerFast(TokenizersBackend):
    """save_pretrained writes this name of the class, which transformers 4 has, too. It has no TokenizersBackend."""


def hf_tokenizer(pretrained: Pretrained) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with this program's tokens. Those of characters have been compared.

    Raises:
        UserError: they differ, because the code of the tokenizer was changed.
    """
    ours = pretrained.tokenizer
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(ours.to_json()),
        model_max_length=pretrained.model_config.block_size,
        clean_up_tokenization_spaces=False,
        eos_token=ours.end_of_text,
        # Not token_type_ids, which transformers 4 adds otherwise; GPT-2 has other logits with them.
        model_input_names=["input_ids", "attention_mask"],
    )
    if isinstance(ours, JSONTokenizer):
        return theirs
    text = ours.decode(range(ours.vocab_size))
    expected = ours.encode(text, "--snapshot").tolist()
    found: list[int] | None = None
    with suppress(Exception):  # an unknown character; tokenizers raises nothing narrower
        found = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if found != expected:
        raise UserError(
            "--snapshot: the tokens of transformers differ from this program's for a text with every token; give the "
            "tokenizer in mingpt/text/tokenizer.py a method to_json that returns its tokenizer.json"
        )
    return theirs


def hf_model(pretrained: Pretrained, eos_token_id: int | None) -> PreTrainedModel:
    """Returns a model whose logits have been compared with this program's.

    Args:
        eos_token_id: ends a generated text; None: nothing does

    Raises:
        UserError: weights or logits differ. The code or the configuration uses something that transformers' class
        lacks.
    """
    config = pretrained.model_config
    stored = dict(pretrained.weights)
    for table in EMBEDDINGS & stored.keys():
        stored[table] = stored[table][: config.vocab_size]  # a padded vocabulary has more rows than tokens
    name = "the GPT2LMHeadModel of transformers"
    shape = GPT2Config(  # type: ignore[call-arg]  # it does not list n_ctx
        vocab_size=config.vocab_size,
        n_positions=config.block_size,
        n_ctx=config.block_size,  # for llama.cpp's convert_hf_to_gguf.py
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        resid_pdrop=config.dropout,
        activation_function="gelu_new" if config.gelu_approximate == "tanh" else "gelu",
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    model = GPT2LMHeadModel(shape).eval()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_k=0,  # its default is 50
        eos_token_id=eos_token_id,
    )
    # Without model.bias, GPT-2's biases stay zeros.
    biases = {key: bias for key, bias in model.state_dict().items() if key.endswith("bias")}
    try:
        model.load_state_dict(biases | to_transformers(stored))
    except RuntimeError as error:  # it lists names and shapes
        details = " ".join(str(error).split())
        raise UserError(f"--snapshot: {name} has other weights: {details}") from error

    gpt = pretrained.build_model().eval()
    idx = torch.arange(config.block_size)[None] % config.vocab_size
    with torch.inference_mode():
        difference = (model(idx).logits - gpt(idx)[0][..., : config.vocab_size]).abs().max().item()
    if difference > MAX_DIFFERENCE:
        raise UserError(f"--snapshot: the logits of {name} differ from this program's by {difference:.3g}")
    return model
