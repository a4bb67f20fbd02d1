"""The formats of Hugging Face transformers' GPT2LMHeadModel and NanoChatForCausalLM: config, tokenizer and weights.

Each function that writes has its inverse beside it.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mingpt.config import LOGIT_CAP, RMS_NORM_EPS, ROTARY_BASE, GPTConfig

# Keys of GPTConfig, and those of config.json. transformers keeps `bias`, which it has no key for.
CONFIG_KEYS = {
    "gpt2": {
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "block_size": "n_positions",
        "vocab_size": "vocab_size",
        "dropout": "resid_pdrop",
        "bias": "bias",
    },
    "nanochat": {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "block_size": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "dropout": "attention_dropout",
        "bias": "bias",
    },
}
# Parts of parameter names, and transformers'. A fused projection is stored as three.
PARAMETER_NAMES = {
    "gpt2": {},
    "nanochat": {
        "transformer.wte": "model.embed_tokens",
        "transformer.h": "model.layers",
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    },
}
GELU_NAMES = {"none": "gelu", "tanh": "gelu_new"}  # gelu_approximate, and transformers' activation_function
# transformers stores GPT-2's as (in, out), as GPT-2's original code does; torch.nn.Linear stores (out, in).
TRANSPOSED = re.compile(r"transformer\.h\..*\.(c_attn|c_proj|c_fc)\.weight")


def hf_config(config: GPTConfig) -> dict[str, Any]:
    """Returns config.json."""
    fixed: dict[str, dict[str, Any]] = {
        "gpt2": {
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": GELU_NAMES[config.gelu_approximate],
            "layer_norm_epsilon": 1e-5,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "tie_word_embeddings": True,
        },
        "nanochat": {
            "architectures": ["NanoChatForCausalLM"],
            "hidden_act": "relu2",
            "rms_norm_eps": RMS_NORM_EPS,
            "intermediate_size": 4 * config.n_embd,
            "num_key_value_heads": config.n_head,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
            "rope_theta": ROTARY_BASE,  # where transformers before version 5 reads it
            "final_logit_softcapping": LOGIT_CAP,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    }
    return {
        "model_type": config.architecture,
        **{theirs: getattr(config, ours) for ours, theirs in CONFIG_KEYS[config.architecture].items()},
        **fixed[config.architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def gpt_config(hf: dict[str, Any]) -> GPTConfig:
    """Returns the configuration of a model with this config.json, whose model_type is one of CONFIG_KEYS.

    Raises:
        KeyError: a key is missing.
        ValueError: the activation function is another one.
    """
    keys = CONFIG_KEYS[hf["model_type"]]
    values = {ours: hf[theirs] for ours, theirs in keys.items()}
    if hf["model_type"] == "gpt2":
        approximations = {theirs: ours for ours, theirs in GELU_NAMES.items()}
        activation = hf["activation_function"]
        if activation not in approximations:
            raise ValueError(
                f"activation_function is {activation} in config.json, must be {' or '.join(approximations)}"
            )
        values["gelu_approximate"] = approximations[activation]
    return GPTConfig(architecture=hf["model_type"], **values)


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
            "unk_token": "",  # it is not in the vocabulary, so an unknown character is an error
        },
    }


def gpt_vocabulary(tokenizer: dict[str, Any]) -> str:
    """Returns the characters of a tokenizer.json in the order of their tokens."""
    tokens = tokenizer["model"]["vocab"]
    return "".join(sorted(tokens, key=tokens.get))


def hf_weights(config: GPTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights by transformers' names, with zeros for GPT-2's biases if the model does not have them."""
    is_gpt2 = config.architecture == "gpt2"
    stored = {}
    for name, weight in weights.items():
        names = _hf_names(config, name)
        for hf_name, part in zip(names, weight.chunk(len(names)), strict=True):
            stored[hf_name] = (part.t() if is_gpt2 and TRANSPOSED.fullmatch(name) else part).contiguous()
        if is_gpt2 and not config.bias and name.endswith("weight") and ".wte." not in name and ".wpe." not in name:
            stored[name.removesuffix("weight") + "bias"] = torch.zeros(stored[name].size(-1))
    return stored


def gpt_weights(config: GPTConfig, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict in fp32; stored tensors that it lacks are left out, such as zeros in place of biases.

    Args:
        expected: state dict of the model, whose names and shapes are read

    Raises:
        KeyError: a tensor is missing.
        ValueError: a tensor has another shape.
    """
    weights = {}
    for name, parameter in expected.items():
        weight = torch.cat([stored[hf_name] for hf_name in _hf_names(config, name)]).float()
        if config.architecture == "gpt2" and TRANSPOSED.fullmatch(name):
            weight = weight.t().contiguous()
        if weight.shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, config.json says {tuple(parameter.shape)}")
        weights[name] = weight
    return weights


def _hf_names(config: GPTConfig, name: str) -> list[str]:
    for ours, theirs in PARAMETER_NAMES[config.architecture].items():
        name = name.replace(ours, theirs)
    return [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")] if "qkv_proj" in name else [name]
