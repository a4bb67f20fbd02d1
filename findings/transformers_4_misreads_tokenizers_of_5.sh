#!/usr/bin/env bash
# A tokenizer that transformers 5 saves does not load in transformers 4, and once the class is renamed, GPT-2 has other
# logits there.
#
# Versions: transformers 5.24.0 and 4.57.6. PreTrainedTokenizerFast, the class for any tokenizer.json, is an alias in
# transformers 5, so save_pretrained writes the new name, TokenizersBackend. With the old name in tokenizer_config.json,
# transformers 4 adds token_type_ids (the default of model_input_names in tokenization_utils_base.py), and GPT-2 adds
# the embedding of token 0 to each position for them (modeling_gpt2.py). In transformers 5, neither happens.
#
# It costs whoever trains with transformers 5 and serves with a program that needs 4: nothing says that the model sees
# other inputs. The keys "tokenizer_class": "PreTrainedTokenizerFast" and "model_input_names": ["input_ids",
# "attention_mask"] together are right in both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
for version in 4.57.6 5.24.0; do
    "$folder/venv/bin/pip" install -q --target "$folder/$version" "transformers==$version"
done
cat > "$folder/save.py" <<'END_SAVE'
import sys

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

print("transformers", transformers.__version__, "saves")
tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(sys.argv[1])
END_SAVE
cat > "$folder/load.py" <<'END_LOAD'
import json
import sys
from pathlib import Path

import torch
import transformers

print("transformers", transformers.__version__, "loads")
torch.manual_seed(0)
sizes = {"vocab_size": 3, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
model = transformers.GPT2LMHeadModel(config).eval()
file = Path(sys.argv[1], "tokenizer_config.json")
saved = json.loads(file.read_text())


def inputs(**changes):
    file.write_text(json.dumps(saved | changes))
    return transformers.AutoTokenizer.from_pretrained(sys.argv[1])("b c a", return_tensors="pt")


try:
    inputs()
    error = ""
except ValueError as exception:
    error = str(exception)
renamed = inputs(tokenizer_class="PreTrainedTokenizerFast")
both = inputs(tokenizer_class="PreTrainedTokenizerFast", model_input_names=["input_ids", "attention_mask"])
file.write_text(json.dumps(saved))
expected = model(renamed["input_ids"]).logits
differences = [(model(**each).logits - expected).abs().max().item() for each in (renamed, both)]
print("as saved:     ", error or "loads")
print("class renamed:", *renamed, f"logits differ by {differences[0]:.2g}")
print("both keys:    ", *both, f"logits differ by {differences[1]:.2g}")
old = transformers.__version__.startswith("4.")
sys.exit(("does not exist" in error, differences[0] > 1e-3, differences[1] > 1e-5) != (old, old, False))
END_LOAD
PYTHONPATH="$folder/5.24.0" "$folder/venv/bin/python" "$folder/save.py" "$folder/tokenizer"
for version in 4.57.6 5.24.0; do
    PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/load.py" "$folder/tokenizer"
done
