"""The format of Hugging Face transformers' GPT2LMHeadModel and NanoChatForCausalLM: config, tokenizer and weights."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mingpt.config.schema import GPTConfig
from mingpt.nn.layers import LOGIT_CAP, RMS_NORM_EPS, ROTARY_BASE

# Parts of our parameter names and of transformers' names for nanochat. transformers stores qkv_proj as three matrices.
NANOCHAT_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h": "model.layers",
    "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
# transformers stores these weights of GPT-2 as (in, out), like GPT-2's original code; torch.nn.Linear has (out, in).
TRANSPOSED = re.compile(r"transformer\.h\..*\.(c_attn|c_proj|c_fc)\.weight")


def hf_config(config: GPTConfig) -> dict[str, Any]:
    """Returns config.json."""
    keys = _nanochat_config(config) if config.architecture == "nanochat" else _gpt2_config(config)
    return {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        **keys,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def _gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "tie_word_embeddings": True,
    }


def _nanochat_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["NanoChatForCausalLM"],
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": 4 * config.n_embd,
        "max_position_embeddings": config.block_size,
        "attention_dropout": config.dropout,
        "attention_bias": False,
        "hidden_act": "relu2",
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "rope_theta": ROTARY_BASE,  # transformers before version 5 reads it here
        "final_logit_softcapping": LOGIT_CAP,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }


def hf_tokenizer(vocabulary: str) -> dict[str, Any]:
    """Returns tokenizer.json: each character is a token."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: token for token, character in enumerate(vocabulary)},
            "unk_token": "",  # not in the vocabulary, so an unknown character is an error
        },
    }


def hf_weights(config: GPTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with transformers' names, and zeros for GPT-2's biases if the model does not have them."""
    return _nanochat_weights(weights) if config.architecture == "nanochat" else _gpt2_weights(weights)


def _gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = {}
    for name, weight in weights.items():
        stored[name] = weight.t().contiguous() if TRANSPOSED.fullmatch(name) else weight
        bias = name.removesuffix("weight") + "bias"
        if bias not in weights and ".wte." not in name and ".wpe." not in name:
            stored[bias] = torch.zeros(stored[name].size(-1))
    return stored


def _nanochat_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = {}
    for name, weight in weights.items():
        hf_name = name
        for ours, theirs in NANOCHAT_NAMES.items():
            hf_name = hf_name.replace(ours, theirs)
        if "qkv_proj" not in hf_name:
            stored[hf_name] = weight
            continue
        for part, matrix in zip(("q_proj", "k_proj", "v_proj"), weight.chunk(3), strict=True):
            stored[hf_name.replace("qkv_proj", part)] = matrix
    return stored
