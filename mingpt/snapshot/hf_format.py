"""Weights in the layout of Hugging Face transformers, in both directions, without transformers."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from mingpt.config.schema import ModelConfig
from mingpt.errors import UserError
from mingpt.text.files import readable
from mingpt.text.tokenizer import read_tokenizer, snapshot_entries

EMBEDDINGS = {"transformer.wte.weight", "lm_head.weight"}  # parameters with a row for each token
GELU_APPROXIMATE = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}  # by activation_function
# Values of other keys that model.py has. A key that is missing has the first one.
SUPPORTED: dict[str, list[Any]] = {
    "model_type": ["gpt2"],
    "activation_function": list(GELU_APPROXIMATE),
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "add_cross_attention": [False],
    "layer_norm_epsilon": [1e-5],
    "tie_word_embeddings": [True],
}


def is_transposed(name: str) -> bool:
    """Returns whether transformers has (in, out), where nn.Linear has (out, in)."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights in the layout of GPT2LMHeadModel."""
    stored = {name: weight.T if is_transposed(name) else weight for name, weight in weights.items()}
    return {"lm_head.weight": weights["transformer.wte.weight"]} | stored


def from_transformers(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with our names. OpenAI's file has no prefix, and has masks."""
    masks = (".attn.bias", ".attn.masked_bias", "lm_head.weight")
    return {
        f"transformer.{name.removeprefix('transformer.')}": weight.T if is_transposed(name) else weight
        for name, weight in stored.items()
        if not name.endswith(masks)
    }


def load_folder(folder: Path, option: str) -> dict[str, Any]:
    """Returns the entries of a snapshot that trainer.init_from and sample.py use, from a folder of transformers.

    Args:
        option: option or key that names the folder, for messages

    Raises:
        UserError: a file can't be read, safetensors is not installed, or the model has something that model.py lacks.
    """
    files = sorted(folder.glob("model*.safetensors"))  # a large model has several
    if not files or not (folder / "tokenizer.json").exists():
        raise UserError(
            f'{option}: {folder} has no model.safetensors or no tokenizer.json. To write both: python -c "from '
            "transformers import AutoModelForCausalLM, AutoTokenizer; [each.from_pretrained"
            f"('{folder}').save_pretrained('{folder}') for each in (AutoModelForCausalLM, AutoTokenizer)]\""
        )
    with readable(str(folder), option):
        from safetensors.torch import load_file  # noqa: PLC0415 - optional

        config = json.loads((folder / "config.json").read_text())
        model, block_size = model_section(config, f"{option}: {folder}/config.json")
        tokenizer = read_tokenizer(str(folder))
        stored = {name: weight.float() for file in files for name, weight in load_file(file).items()}
        weights = from_transformers(stored)
        embedding = weights["transformer.wte.weight"]
    if len(embedding) < tokenizer.vocab_size:
        raise UserError(
            f"{option}: {folder}/tokenizer.json has {tokenizer.vocab_size} tokens, but the embedding has "
            f"{len(embedding)} rows; remove the tokens that were added, or resize the embedding in transformers"
        )
    weights["transformer.wte.weight"] = embedding[: tokenizer.vocab_size]  # there may be more rows than tokens
    sections = {"model": model, "data": {"block_size": block_size}}
    return {"config": sections, **snapshot_entries(tokenizer), "model": weights, "optimizer": {}}


def model_section(config: dict[str, Any], source: str) -> tuple[dict[str, Any], int]:
    """Returns our section `model` for a config.json, and block_size.

    Args:
        source: names the file, for messages

    Raises:
        UserError: the model has something that model.py lacks.
    """
    supported = SUPPORTED | {"n_inner": [None, 4 * config.get("n_embd", 0)]}
    for key, values in supported.items():
        value = config.get(key, values[0])
        if value not in values:
            raise UserError(f"{source} has {key} {json.dumps(value)}, must be {' or '.join(map(json.dumps, values))}")
    section = {key: config[key] for key in ("n_layer", "n_head", "n_embd")}
    section["gelu_approximate"] = GELU_APPROXIMATE[config.get("activation_function", "gelu_new")]
    return asdict(ModelConfig()) | section, config["n_positions"]
