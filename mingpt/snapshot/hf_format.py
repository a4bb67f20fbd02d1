"""Weights in the layout of Hugging Face transformers, in both directions, without transformers."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, cat, device

from mingpt.config.schema import GPTConfig, ModelConfig
from mingpt.errors import UserError
from mingpt.nn.layers import LOGIT_CAP, ROTARY_BASE
from mingpt.text.files import readable
from mingpt.text.tokenizer import parse_tokenizer
from model import GPT

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
# Values of other keys that model.py has. A key that is missing has the first one.
SUPPORTED: dict[str, list[Any]] = {
    "model_type": list(SHAPES),
    "activation_function": list(GELU_APPROXIMATE),
    "scale_attn_by_inverse_layer_idx": [False],
    "hidden_act": ["relu2"],
    "final_logit_softcapping": [LOGIT_CAP],
    "rope_theta": [ROTARY_BASE],
}


def their_names(name: str, architecture: str) -> list[str]:
    """Returns transformers' names for a parameter. nanochat has a matrix each for queries, keys and values."""
    if architecture == "gpt2":
        return [name]
    for ours, theirs in NANOCHAT_NAMES.items():
        name = name.replace(ours, theirs)
    if name.endswith("c_attn.weight"):
        return [name.replace("c_attn", f"{part}_proj") for part in "qkv"]
    return [name]


def is_transposed(name: str, architecture: str) -> bool:
    """Returns whether transformers has (in, out), where nn.Linear has (out, in)."""
    return architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def to_transformers(weights: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Returns weights in the layout of GPT2LMHeadModel or NanoChatForCausalLM."""
    stored = {"lm_head.weight": weights["transformer.wte.weight"]}  # nanochat has its own
    for name, weight in weights.items():
        names = their_names(name, architecture)
        parts = [weight.T] if is_transposed(name, architecture) else weight.chunk(len(names))
        stored.update(zip(names, parts, strict=True))
    return stored


def from_transformers(stored: dict[str, Tensor], names: Iterable[str], architecture: str) -> dict[str, Tensor]:
    """Returns the weights with our names. Others keep transformers' names, so that they are reported."""
    if architecture == "gpt2":  # OpenAI's file has no prefix, and has masks
        masks = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
        stored = {
            f"transformer.{name.removeprefix('transformer.')}": weight
            for name, weight in stored.items()
            if not name.endswith(masks)
        }
    weights = {}
    for name in names:
        parts = [stored.pop(each) for each in their_names(name, architecture)]
        weights[name] = parts[0].T if is_transposed(name, architecture) else cat(parts)
    return weights | stored


def load_folder(folder: Path, option: str) -> dict[str, Any]:
    """Returns the entries of a snapshot that trainer.init_from and sample.py use, from a folder of transformers.

    Args:
        option: option or key that names the folder, for messages

    Raises:
        UserError: a file can't be read, safetensors is not installed, or the model has something that model.py lacks.
    """
    with readable(str(folder), option):
        from safetensors.torch import load_file  # noqa: PLC0415 - optional

        config = json.loads((folder / "config.json").read_text())
        model, block_size = model_section(config, f"{option}: {folder}/config.json")
        tokenizer = parse_tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
        files = folder.glob("model*.safetensors")  # a large model has several
        stored = {name: weight.float() for file in files for name, weight in load_file(file).items()}
        with device("meta"):
            names = GPT(GPTConfig(**model, vocab_size=1, block_size=1)).state_dict()
        weights = from_transformers(stored, names, model["architecture"])
    for name in EMBEDDINGS & weights.keys():
        weights[name] = weights[name][: tokenizer.vocab_size]  # there may be more rows than tokens
    sections = {"model": model, "data": {"block_size": block_size}}
    return {"config": sections, **tokenizer.snapshot_entries(), "model": weights, "optimizer": {}}


def model_section(config: dict[str, Any], source: str) -> tuple[dict[str, Any], int]:
    """Returns our section `model` for a config.json, and block_size.

    Args:
        source: names the file, for messages

    Raises:
        UserError: the model has something that model.py lacks.
    """
    config = config | (config.get("rope_parameters") or {})
    _check(config, SUPPORTED, source)
    architecture = config["model_type"]
    n_layer, n_head, n_embd, block_size = (config[key] for key in SHAPES[architecture])
    gelu = GELU_APPROXIMATE[config.get("activation_function", "gelu_new")] if architecture == "gpt2" else "none"
    section = {"architecture": architecture, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return asdict(ModelConfig()) | section | {"gelu_approximate": gelu}, block_size


def _check(config: Mapping[str, Any], supported: Mapping[str, list[Any]], source: str) -> None:
    for key, values in supported.items():
        value = config.get(key, values[0])
        if value not in values:
            raise UserError(f"{source} has {key} {json.dumps(value)}, must be {' or '.join(map(json.dumps, values))}")
