#!/usr/bin/env bash
# torch.hash_tensor has the same value for tensors with exchanged rows, and for a tensor and its negative.
#
# Version: PyTorch 2.13.0. Its only mode is the exclusive or of the elements' bits as 64-bit numbers (hash_tensor in
# torch/_torch_docs.py, XORReduceKernel.cpp), so neither the order of elements counts, nor a change of the same bit in
# an even number of elements.
#
# Programs that compute something twice and compare hashes to find faulty hardware, or that compare the weights of
# ranks, miss exchanged rows or shards, and every change that comes in pairs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/trial.py" <<'END'
import sys

import torch

print("PyTorch", torch.__version__)
x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
one_changed = x.clone()
one_changed[0, 0] *= -1
hashes = {
    "x": x,
    "x with its rows in reverse order": x.flip(0),
    "-x": -x,
    "x with one element negated": one_changed,
}
hashes = {name: torch.hash_tensor(tensor).item() for name, tensor in hashes.items()}
for name, value in hashes.items():
    print(f"{value:>20} {name}")
first, *same, changed = hashes.values()
sys.exit(set(same) != {first} or changed == first)
END
"$folder/venv/bin/python" "$folder/trial.py"
