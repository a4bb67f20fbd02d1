"""Exports a snapshot into a folder that Hugging Face transformers loads."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mingpt.system.signals import start_program

if __name__ == "__main__":
    start_program()

from mingpt.config.parser import default_snapshot_path
from mingpt.config.schema import Config, config_to_dict
from mingpt.config.yaml_format import format_value
from mingpt.errors import UserError
from mingpt.program import run_program
from mingpt.snapshot.load import Pretrained, load_pretrained
from mingpt.system.torch_versions import check_torch


def model_card(pretrained: Pretrained, name: str) -> str:
    """Returns a README.md with the digest of the text, the loss, and the command that trained the model."""
    snapshot = pretrained.snapshot
    config = pretrained.model_config
    defaults = config_to_dict(Config())
    command = ["python", "main.py"]
    for section, keys in snapshot["config"].items():
        for key, value in keys.items():
            if value != defaults[section].get(key):
                text = re.sub("(//)[^/@]*@", r"\1", format_value(value))  # user and password of a URL
                text = re.sub(f"^{re.escape(os.path.expanduser('~'))}/", "~/", text)
                command.append(f"--{section}.{key}={text}")
    val_loss = "not measured" if snapshot["val_loss"] is None else f"{snapshot['val_loss']:.4f} nats per token"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A GPT-2: {config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide,
{sum(weight.numel() for weight in pretrained.weights.values()):,} parameters.
Prompt and generated text together have at most {config.block_size} tokens.

There is no padding token. To pad prompts of different lengths, on the left, first set
`tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)`. To train on padded texts, add a token instead: a collator
ignores the targets that equal the padding token, which are tokens of the text here.

| | |
| --- | --- |
| validation loss | {val_loss} |
| trained for | {snapshot["step"]:,} steps, {snapshot["samples"] * config.block_size:,} tokens |
| SHA-256 of the text | {snapshot["text_sha256"]} |

Trained by

```
{shlex.join(command)}
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
prompt = tokenizer({pretrained.tokenizer.default_prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens={config.block_size - 1})[0]))
```
"""


def run(argv: Sequence[str]) -> None:
    """Exports a snapshot to a folder.

    Raises:
        UserError: transformers or the snapshot is missing, transformers does not have such a model, or the folder can't
            be written.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--snapshot",
        metavar="PATH",
        help="snapshot, or folder (loads its newest snapshot); may be a URL (default: the run of gpt2_train_cfg.yaml)",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="new or empty folder")
    args = parser.parse_args(argv)
    check_torch()
    path = args.snapshot or default_snapshot_path()
    out = Path(args.out)
    pretrained = load_pretrained(path, "--snapshot")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out: {out} is not an empty folder; name an empty or a new folder")
        if "step" not in pretrained.snapshot:
            raise UserError(f"--snapshot: {path} is a folder of transformers already; name a snapshot or a run folder")
        try:
            from mingpt.snapshot.hf_export import hf_model, hf_tokenizer
        except ImportError as error:
            raise UserError(f"export.py needs transformers 5 ({error}): pip install 'transformers>=5'") from error
        tokenizer = hf_tokenizer(pretrained)
        model = hf_model(pretrained, tokenizer.eos_token_id)
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(out)
        (out / "tokenizer.json").write_text(pretrained.tokenizer.to_json(), encoding="utf-8")
        model.save_pretrained(out)
        (out / "README.md").write_text(model_card(pretrained, out.absolute().name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {out} can't be written: {error}; name a folder that you may write to") from error
    print(
        f"{out}: step {pretrained.snapshot['step']}; open it with transformers' "
        f"AutoModelForCausalLM.from_pretrained({args.out!r}), as {out}/README.md shows"
    )


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
