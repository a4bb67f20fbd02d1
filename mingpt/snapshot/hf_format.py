"""Converts a snapshot to a model and a tokenizer of Hugging Face transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from mingpt.errors import UserError
from mingpt.snapshot.load import EMBEDDINGS, Pretrained

MAX_DIFFERENCE = 1e-3  # between logits; rounding errors are 1e-5 with logits up to 15
# Parts of our parameter names and of transformers' names for nanochat.
NANOCHAT_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h": "model.layers",
    "attn.c_attn": "self_attn.c_attn",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def hf_tokenizer(pretrained: Pretrained) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each character.

    Raises:
        UserError: a token has several characters, because the code was changed.
    """
    tokens = {character: token for token, character in enumerate(pretrained.tokenizer.vocabulary)}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token=""))  # not in the vocabulary: unknown characters raise an error
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    if max(map(len, tokens)) > 1:
        raise UserError("--snapshot: some tokens have several characters; export.py writes tokens of single characters")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=pretrained.model_config.block_size,
        clean_up_tokenization_spaces=False,
    )


def hf_model(pretrained: Pretrained) -> PreTrainedModel:
    """Returns a model whose logits have been compared with this program's.

    Raises:
        UserError: weights or logits differ. The code or the configuration uses something that transformers' class
        lacks.
    """
    config = pretrained.model_config
    stored = dict(pretrained.weights)
    for table in EMBEDDINGS & stored.keys():
        stored[table] = stored[table][: config.vocab_size]  # a padded vocabulary has more rows than tokens
    name = f"the {config.architecture} of transformers"
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_size": config.n_embd,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.architecture == "nanochat":
        values |= {"intermediate_size": 4 * config.n_embd, "attention_dropout": config.dropout}
        weights = nanochat_weights(stored)
    else:
        values |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout)
        values["activation_function"] = "gelu"
        weights = gpt2_weights(stored)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.architecture, **values)).eval()
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_k=0)  # its default is 50
    # Without model.bias, GPT-2's biases stay zeros.
    biases = {key: bias for key, bias in model.state_dict().items() if key.endswith("bias")}
    try:
        model.load_state_dict(biases | weights)
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


def gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights in the layout of GPT2LMHeadModel, which has (in, out) where nn.Linear has (out, in)."""
    stored = {"lm_head.weight": weights["transformer.wte.weight"]}
    for name, weight in weights.items():
        is_linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        stored[name] = weight.T if is_linear else weight
    return stored


def nanochat_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights in the layout of NanoChatForCausalLM, with a matrix each for queries, keys and values."""
    stored = {}
    for our_name, weight in weights.items():
        name = our_name
        for ours, theirs in NANOCHAT_NAMES.items():
            name = name.replace(ours, theirs)
        if name.endswith("c_attn.weight"):
            for part, matrix in zip("qkv", weight.chunk(3), strict=True):
                stored[name.replace("c_attn", f"{part}_proj")] = matrix
        else:
            stored[name] = weight
    return stored
