"""How is it used elsewhere? A snapshot as a folder that Hugging Face transformers opens."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from mingpt.config import Config, config_to_dict
from mingpt.config_parser import default_snapshot_path
from mingpt.snapshot.pretrained import TRANSPOSED, Pretrained, load_pretrained
from mingpt.utils.errors import UserError
from mingpt.utils.progress import run_script


def config_of(model: Pretrained) -> dict[str, Any]:
    """config.json: GPT-2's, with `bias`, which transformers leaves alone, so that the way back is exact."""
    shape = model.shape
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": shape.block_size,
        "vocab_size": shape.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "bias": shape.bias,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def tokenizer_of(vocabulary: str) -> dict[str, Any]:
    """tokenizer.json, in the format of Hugging Face tokenizers: each character a word. Unknown ones are refused."""
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
            "unk_token": "",  # in no vocabulary, so that an unknown character is an error instead of a guess
        },
    }


def weights_of(model: Pretrained) -> dict[str, torch.Tensor]:
    """Weights by transformers' names, fp32; biases that a model goes without are zeros."""
    weights = {}
    for name, weight in model.weights.items():
        weights[name] = weight.t().contiguous() if TRANSPOSED.fullmatch(name) else weight.contiguous()
        if not model.shape.bias and name.endswith("weight") and ".wte." not in name and ".wpe." not in name:
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(weights[name].size(-1))
    return weights


def card_of(model: Pretrained, source: str, name: str) -> str:
    """README.md: what the model has learned from which text, with the command that trained it."""
    snapshot, shape = model.snapshot, model.shape
    defaults = config_to_dict(Config())
    changed = [
        f"--{section}.{key} {shlex.quote(json.dumps(value) if not isinstance(value, str) else value)}"
        for section, keys in snapshot["config"].items()
        for key, value in keys.items()
        if value != defaults[section].get(key)
    ]
    val_loss = "not measured" if snapshot["val_loss"] is None else f"{snapshot['val_loss']:.4f} nats per character"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A GPT that writes characters: {shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide,
{sum(weight.numel() for weight in model.weights.values()):,} parameters. It sees {shape.block_size} characters at once,
so prompt and new text together may have as many, and it knows {shape.vocab_size} of them.

| | |
| --- | --- |
| validation loss | {val_loss} |
| trained for | {snapshot["step"]:,} steps, {snapshot["samples"] * shape.block_size:,} characters |
| SHA-256 of the text | {snapshot["text_sha256"]} |
| exported from | {os.path.basename(source)} |

Trained by `{" ".join(["python main.py", *changed])}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
prompt = tokenizer({model.vocabulary[0]!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt)[0]))
```
"""


def export(model: Pretrained, source: str, out: Path) -> None:
    """Writes the folder, whole or not at all.

    Args:
        model: from a snapshot
        source: the snapshot's path
        out: a folder that is empty or not there

    Raises:
        UserError: it holds something, or can't be written.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out: {out} is not an empty folder; name one that is, or that is not there yet")
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f"{out.name}.unfinished-", dir=out.parent))
        try:
            beside.chmod(0o755)  # as mkdir would, not as mkdtemp does
            jsons = {
                "config.json": config_of(model),
                "tokenizer.json": tokenizer_of(model.vocabulary),
                "tokenizer_config.json": {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "model_max_length": model.shape.block_size,
                    "clean_up_tokenization_spaces": False,
                },
                "generation_config.json": {
                    "do_sample": True,
                    "temperature": 0.8,
                    "max_length": model.shape.block_size,
                },
            }
            for name, content in jsons.items():
                (beside / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            (beside / "README.md").write_text(card_of(model, source, out.name), encoding="utf-8")
            weights = safetensors.torch.save(weights_of(model), {"format": "pt"})
            (beside / "model.safetensors").write_bytes(weights)
            os.replace(beside, out)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise UserError(f"--out: {out} can't be written: {error}") from error


def run(argv: Sequence[str]) -> None:
    """Exports the snapshot that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = "file, or folder of which the newest is taken; may be a URL (default: the default run)"
    parser.add_argument("--snapshot", metavar="PATH", help=which)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder to make; an empty one will do")
    asked = parser.parse_args(argv)
    path = asked.snapshot or default_snapshot_path()
    model = load_pretrained(path, "--snapshot", lambda line: print(line, file=sys.stderr))
    if not model.snapshot:
        raise UserError(f"--snapshot: {path} is an export already; copy the folder")
    export(model, path, Path(asked.out))
    print(
        f"{asked.out}: step {model.snapshot['step']}; open it with transformers' AutoModelForCausalLM.from_pretrained("
        f"{asked.out!r}), as {asked.out}/README.md shows"
    )


if __name__ == "__main__":
    sys.exit(run_script(run))
