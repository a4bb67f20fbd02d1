"""Weights in the layout of Hugging Face transformers, in both directions, without transformers."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, cat

from mingpt.config.schema import ModelConfig
from mingpt.errors import UserError
from mingpt.nn.layers import LOGIT_CAP, RMS_NORM_EPS, ROTARY_BASE
from mingpt.text.files import readable
from mingpt.text.tokenizer import parse_tokenizer

EMBEDDINGS = {"transformer.wte.weight", "lm_head.weight"}  # parameters with a row for each token
# Parts of our parameter names and of transformers' names for nanochat.
NANOCHAT_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h": "model.layers",
    "attn.c_attn": "self_attn.c_attn",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
# Keys of config.json for n_layer, n_head, n_embd and block_size
SHAPES = {
    "gpt2": ("n_layer", "n_head", "n_embd", "n_positions"),
    "nanochat": ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"),
}
GELU_APPROXIMATE = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}  # by activation_function


def gpt2_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of GPT2LMHeadModel in our layout, or ours in its: (in, out) or (out, in), both ways."""
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: weight.T if name.endswith(linear) else weight for name, weight in weights.items()}


def to_gpt2(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights in the layout of GPT2LMHeadModel."""
    return {"lm_head.weight": weights["transformer.wte.weight"]} | gpt2_layout(weights)


def from_gpt2(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights of GPT2LMHeadModel, without masks. OpenAI's file has no prefix `transformer.`."""
    masks = (".attn.bias", ".attn.masked_bias")
    kept = {name: weight for name, weight in weights.items() if not name.endswith((*masks, "lm_head.weight"))}
    return gpt2_layout({f"transformer.{name.removeprefix('transformer.')}": weight for name, weight in kept.items()})


def to_nanochat(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights in the layout of NanoChatForCausalLM, with a matrix each for queries, keys and values."""
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


def from_nanochat(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights of NanoChatForCausalLM."""
    found = {}
    for their_name, weight in weights.items():
        if their_name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        matrices = [weight]
        if their_name.endswith("q_proj.weight"):
            matrices = [weights[their_name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        name = their_name.replace("q_proj", "c_attn")
        for ours, theirs in NANOCHAT_NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = cat(matrices)
    return found


def load_folder(folder: Path, option: str) -> dict[str, Any]:
    """Returns the entries of a snapshot that trainer.init_from and sample.py use, from a folder of transformers.

    Args:
        option: option or key that names the folder, for messages

    Raises:
        UserError: a file can't be read, safetensors is not installed, or the model has something that model.py lacks.
    """
    try:
        from safetensors.torch import load_file  # noqa: PLC0415 - optional
    except ImportError as error:
        raise UserError(f"{option}: {folder} is a folder of transformers: {error}; pip install safetensors") from error
    source = f"{option}: {folder}"
    with readable(str(folder), option):
        config = json.loads((folder / "config.json").read_text())
        model = model_section(config, f"{source}/config.json")
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = parse_tokenizer(text, f"{source}/tokenizer.json")
        files = [folder / "model.safetensors"]
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        stored = {name: weight.float() for file in files for name, weight in load_file(file).items()}
        is_nanochat = model["architecture"] == "nanochat"
        weights = from_nanochat(stored) if is_nanochat else from_gpt2(stored)
        block_size = config[SHAPES[model["architecture"]][-1]]
    for name in EMBEDDINGS & weights.keys():
        weights[name] = weights[name][: tokenizer.vocab_size]  # there may be more rows than tokens
    sections = {"model": model, "data": {"block_size": block_size}}
    return {"config": sections, **tokenizer.snapshot_entries(), "model": weights, "optimizer": {}}


def model_section(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns our section `model` for a config.json.

    Args:
        source: names the file, for messages

    Raises:
        UserError: the model has something that model.py lacks.
    """
    architecture = config.get("model_type")
    if architecture not in SHAPES:
        raise UserError(f"{source} has model_type {architecture}, must be {' or '.join(SHAPES)}")
    n_layer, n_head, n_embd, _ = (config[key] for key in SHAPES[architecture])
    # The values that model.py has for other keys. transformers' default is the first one.
    if architecture == "gpt2":
        allowed = {
            "activation_function": list(GELU_APPROXIMATE),
            "n_inner": [None, 4 * n_embd],
            "layer_norm_epsilon": [1e-5],
            "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False],
            "tie_word_embeddings": [True],
        }
    else:
        config = {**config, **(config.get("rope_parameters") or {})}
        allowed = {
            "hidden_act": ["relu2"],
            "num_key_value_heads": [None, n_head],
            "intermediate_size": [4 * n_embd],
            "rms_norm_eps": [RMS_NORM_EPS],
            "final_logit_softcapping": [LOGIT_CAP],
            "rope_type": ["default"],
            "rope_theta": [ROTARY_BASE],
            "attention_bias": [False],
            "tie_word_embeddings": [False],
        }
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            raise UserError(f"{source} has {key} {json.dumps(value)}, must be {' or '.join(map(json.dumps, values))}")
    section = {"architecture": architecture, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    if architecture == "gpt2":
        section["gelu_approximate"] = GELU_APPROXIMATE[config.get("activation_function", "gelu_new")]
    return asdict(ModelConfig()) | section
