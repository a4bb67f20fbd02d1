#!/usr/bin/env bash
# Building any optimizer of torch.optim, and initializing a module on the meta device, imports torch._dynamo.
#
# Version: PyTorch 2.13.0. A program that never calls torch.compile imports the compiler, and SymPy with it, in these
# two lines: torch.optim.SGD([parameter]) and, within torch.device("meta"), torch.nn.Embedding(2, 2). Source:
# Optimizer.add_param_group and torch._refs.normal_ are decorated with torch._disable_dynamo (torch/_compile.py), which
# imports torch._dynamo to tell it not to compile a function, when that function is first called.
#
# The import takes about as long as `import torch` (on one machine with an H100, 5.9 seconds). Every process that trains
# or builds a model on the meta device waits for it, again at each restart by an elastic launcher.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/trial.py" <<'END'
import sys
import time

began = time.perf_counter()
import torch

import_seconds = time.perf_counter() - began
print("PyTorch", torch.__version__)
assert "torch._dynamo" not in sys.modules, "import torch imports torch._dynamo"
began = time.perf_counter()
if sys.argv[1] == "optimizer":
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
else:
    with torch.device("meta"):
        torch.nn.Embedding(2, 2)
seconds = time.perf_counter() - began
print(f"{sys.argv[1]}: {seconds:.2f} s, import torch: {import_seconds:.2f} s")
print("torch._dynamo is imported:", "torch._dynamo" in sys.modules)
sys.exit("torch._dynamo" not in sys.modules)
END
"$folder/venv/bin/python" "$folder/trial.py" optimizer
"$folder/venv/bin/python" "$folder/trial.py" meta
