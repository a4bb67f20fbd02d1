"""Code paths of GPUs without a GPU: what the host waits for in the steps of each configuration.

    python -m tests.gpu.rig [PATTERN ...]

runs the cases whose names match a pattern, by default all, and prints a table: seconds, and what was found. A case
trains a few steps on one rank of a pretended GPU, with all that the loop does between log lines, and evaluates; with
one rank, it starts to save a snapshot, too. Nothing may be found: no operation for which the host waits for the device,
no copy from the device that is read without a synchronization, and no copy to the device from memory that is not
pinned, or of a tensor that is not contiguous. Cases whose names begin with "fault" make a mistake, which must be found.

It does not see kernels (their results, their speed, whether there is one for a dtype, waits inside them), NCCL and what
other ranks do, races between streams, the C++ code of DistributedDataParallel, compiled code, memory that runs out, and
reads by `tolist` or `numpy`, which go around PyTorch's dispatcher.
"""

import argparse
import json
import os
import tempfile
import time
import traceback
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu import pretended_gpu

COMMON = {
    "data.block_size": 16,
    "model.n_layer": 1,
    "model.n_head": 2,
    "model.n_embd": 16,
    "trainer.batch_size": 8,
    "trainer.micro_batch_size": 2,
    "trainer.max_steps": 1000,
    "trainer.log_every": 1000,
    "trainer.eval_every": 1000,
    "trainer.sample_every": 1000,
    "trainer.save_every": 1000,
    "trainer.save_overhead": "null",
    "trainer.threads": 1,
}
PRECISIONS, OPTIMIZERS = ("fp32", "bf16", "fp16"), ("adamw", "muon")
# The optimizer runs on the host, so it waits for the gradients, and for their norm, which is summed up on the device.
OFFLOAD_WAITS = (
    "torch.cuda.Event.synchronize() waits for the device: in a thread of autograd",
    "copy to the device from memory that is not pinned: mingpt/parallel/sharded.py",
    "copy to the host that is not non_blocking: mingpt/parallel/sharded.py",
)


RACE = "reads a copy from the device without a synchronization"
FAULTS = {  # names in tests/gpu/dry_run.py, and what is found
    "strided": "copy to the device of a tensor that is not contiguous: mingpt/parallel/strategy.py:",
    "pageable": "copy to the device from memory that is not pinned: mingpt/parallel/strategy.py:",
    "blocking": "copy to the device that is not non_blocking: mingpt/parallel/strategy.py:",
    "item": "item() waits for the device: trainer.py:",
    "tensor": "copy to the device from memory that is not pinned: trainer.py:",
    "nonzero": "aten.nonzero waits for the device, for the size of its result: trainer.py:",
    "mask": "aten.index waits for the device, for the size of its result: trainer.py:",
    "synchronize": "torch.cuda.synchronize() waits for the device: trainer.py:",
    "event": "torch.cuda.Event.synchronize() waits for the device: trainer.py:",
    "read": "copy to the host that is not non_blocking: trainer.py:",
    "snapshot": f"aten.linalg_vector_norm {RACE}: mingpt/snapshot/writer.py:",
    "race": f"aten.add {RACE}: trainer.py:",
}


class Case(NamedTuple):
    """A configuration, the rank whose operations run, and what must be found."""

    options: dict[str, Any]
    rank: int = 0
    world_size: int = 2
    fault: str | None = None
    expected: tuple[str, ...] = ()  # beginnings of the descriptions

    @property
    def argv(self) -> list[str]:
        return [f"--{key}={value}" for key, value in (COMMON | self.options).items()]


def _cases() -> dict[str, Case]:
    """All cases: selective checkpointing and gpipe with gpt2, others with nanochat, one rank with convolutions."""
    cases: dict[str, Case] = {}
    for precision, optimizer in product(PRECISIONS, OPTIMIZERS):
        name, options = f"{precision}-{optimizer}", {"trainer.precision": precision, "optimizer.name": optimizer}
        cases[f"one-{name}"] = Case(options | {"model.conv_kernel_size": 4}, world_size=1)
        for strategy, mode in product(("ddp", "zero1", "zero2", "fsdp"), ("none", "selective", "full")):
            parallel = {"distributed.strategy": strategy, "trainer.activation_checkpointing": mode}
            parallel["model.architecture"] = "gpt2" if mode == "selective" else "nanochat"
            cases[f"{strategy}-{name}-{mode}"] = Case(options | parallel)
        if precision != "fp16":
            tree = {"distributed.reduction": "tree", "trainer.deterministic": "true"}
            cases[f"tree-{name}"] = Case(options | tree)
        if precision != "fp16" and optimizer == "adamw":
            offload = {"distributed.strategy": "fsdp", "distributed.cpu_offload": "true"}
            cases[f"offload-{name}"] = Case(options | offload, expected=OFFLOAD_WAITS)
        stages = options | {"distributed.pipeline_stages": 2, "model.n_layer": 2}
        for schedule, stage in product(("1f1b", "gpipe"), (0, 1)):
            pipeline = stages | {"distributed.pipeline_schedule": schedule}
            pipeline["model.architecture"] = "gpt2" if schedule == "gpipe" else "nanochat"
            cases[f"{schedule}-{name}-stage{stage}"] = Case(pipeline, rank=stage)
        for strategy, stage in product(("zero1", "zero2", "fsdp"), (0, 1)):
            if name == "fp16-muon":  # two replicas; the other combinations have no other code
                case = Case(stages | {"distributed.strategy": strategy}, rank=2 + stage, world_size=4)
                cases[f"1f1b-{strategy}-{name}-stage{stage}"] = case
    for fault, description in FAULTS.items():
        options = {"trainer.batch_size": 2}
        cases[f"fault-{fault}"] = Case(options, world_size=1, fault=fault, expected=(description,))
    return cases


CASES = _cases()


def run_case(case: Case) -> dict[str, Any]:
    """Returns how often what was found and not expected, which expected descriptions were missing, and the seconds."""
    from tests.gpu.dry_run import dry_run

    began = time.perf_counter()
    try:
        found = dry_run(case.rank, case.world_size, case.argv, case.fault)
    except Exception:
        found = {traceback.format_exc(limit=-4, chain=False): 1}
    missing = [text for text in case.expected if not any(what.startswith(text) for what in found)]
    found = {what: count for what, count in found.items() if not any(map(what.startswith, case.expected))}
    return {"found": found, "missing": missing, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN", help="names of cases; * is any text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if reason := pretended_gpu.unsupported_reason():
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder:
        if pretended_gpu.LIBRARY not in os.environ:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ[pretended_gpu.LIBRARY] = str(pretended_gpu.compile_library(Path(folder)))
            pretended_gpu.install()
        names = [name for name in CASES if any(fnmatch(name, pattern) for pattern in args.patterns)]
        results = {}
        for name in names:
            results[name] = result = run_case(CASES[name])
            if not args.json:
                lines = [f"{count} x {what}" for what, count in result["found"].items()]
                lines += [f"missing: {text}" for text in result["missing"]]
                print(f"{name:34}{result['seconds']:6.2f} s  " + f"\n{'':44}".join(lines or ["ok"]))
    if args.json:
        print(json.dumps(results))
    else:
        print(f"{len(results)} cases, {sum(result['seconds'] for result in results.values()):.0f} s")


if __name__ == "__main__":
    main()
