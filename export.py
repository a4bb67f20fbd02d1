"""Exports a snapshot into a folder that Hugging Face transformers loads."""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mingpt.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import safetensors.torch

from mingpt.config.parser import default_snapshot_path
from mingpt.config.schema import Config, config_to_dict
from mingpt.config.yaml_format import format_value
from mingpt.errors import UserError
from mingpt.program import run_program
from mingpt.snapshot.hf_format import hf_config, hf_tokenizer, hf_weights
from mingpt.snapshot.load import Pretrained, load_pretrained
from mingpt.system.torch_versions import check_torch_version


def model_card(pretrained: Pretrained, source: str, name: str) -> str:
    """Returns the README.md with the training text, the loss, and the command that trained the model."""
    snapshot = pretrained.snapshot
    config = pretrained.model_config
    defaults = config_to_dict(Config())
    command = ["python", "main.py"]
    for section, keys in snapshot["config"].items():
        for key, value in keys.items():
            if value != defaults[section].get(key):
                command.append(f"--{section}.{key}={format_value(value)}")
    val_loss = "not measured" if snapshot["val_loss"] is None else f"{snapshot['val_loss']:.4f} nats per character"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A character-level GPT of architecture {config.architecture}: {config.n_layer} layers, {config.n_head} heads,
{config.n_embd} wide, {sum(weight.numel() for weight in pretrained.weights.values()):,} parameters.
Prompt and generated text together have at most {config.block_size} characters.
The tokenizer knows the {config.vocab_size} distinct characters of the training text. Any other character is an error,
`Missing [UNK] token`; `"".join(c for c in text if c in tokenizer.get_vocab())` removes such characters.

| | |
| --- | --- |
| validation loss | {val_loss} |
| trained for | {snapshot["step"]:,} steps, {snapshot["samples"] * config.block_size:,} characters |
| SHA-256 of the text | {snapshot["text_sha256"]} |
| exported from | {os.path.basename(source)} |

Trained by

```
{shlex.join(command)}
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
prompt = tokenizer({pretrained.vocabulary[0]!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt)[0]))
```
"""


def export(pretrained: Pretrained, source: str, out: Path) -> None:
    """Writes a folder with a temporary name and renames it.

    Args:
        source: path of the snapshot, for the model card
        out: an empty folder, or one that does not exist

    Raises:
        UserError: the folder is not empty, or can't be written.
    """
    block_size = pretrained.model_config.block_size
    json_files = {
        "config.json": hf_config(pretrained.model_config),
        "tokenizer.json": hf_tokenizer(pretrained.vocabulary),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": block_size,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"do_sample": True, "temperature": 0.8, "max_length": block_size},
    }
    files = {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in json_files.items()}
    files["README.md"] = model_card(pretrained, source, out.name)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out: {out} is not an empty folder; name an empty or a new folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
        unfinished.mkdir()
        try:
            for name, text in files.items():
                (unfinished / name).write_text(text, encoding="utf-8")
            weights = safetensors.torch.save(hf_weights(pretrained.model_config, pretrained.weights), {"format": "pt"})
            (unfinished / "model.safetensors").write_bytes(weights)
            os.replace(unfinished, out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UserError(f"--out: {out} can't be written: {error}; name a folder that you may write to") from error


def run(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--snapshot",
        metavar="PATH",
        help="file, or folder (its newest snapshot is loaded); may be a URL (default: the run of gpt2_train_cfg.yaml)",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="new or empty folder")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C raises, so that no unfinished folder remains
    check_torch_version()
    path = default_snapshot_path() if args.snapshot is None else args.snapshot
    pretrained = load_pretrained(path, "--snapshot")
    if (size := pretrained.model_config.conv_kernel_size) is not None:
        raise UserError(
            f"--snapshot: {path} has model.conv_kernel_size {size}, must be null: the classes of transformers do not "
            "support convolutions"
        )
    longest = max(pretrained.vocabulary, key=len)
    if len(longest) > 1:  # the code was changed to other tokens
        raise UserError(
            f"--snapshot: {path} has the token {longest!r}, must have single characters, which are the tokens of "
            "tokenizer.json"
        )
    export(pretrained, path, Path(args.out))
    print(
        f"{args.out}: step {pretrained.snapshot['step']}; open it with transformers' "
        f"AutoModelForCausalLM.from_pretrained({args.out!r}), as {args.out}/README.md shows"
    )


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
