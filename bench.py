"""How fast is it? Ratios of two things measured in turn in one run on this machine, as a table.

    python bench.py
    python bench.py trainer snapshots --model.n_embd 256
    python bench.py nanogpt tutorial --nanogpt FOLDER --tutorial FOLDER --json
    torchrun --standalone --nproc_per_node=4 bench.py strategies

Without names, all of them. FOLDER holds the model.py of nanoGPT or of the minGPT-DDP tutorial. All else are main.py's
own options, for all that is measured.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.cases import BASELINE_OPTIONS, CASES, MULTI_RANK_CASES
from benchmarks.harness import Bench, Row, SkippedError, machine
from mingpt.config_parser import build_parser, config_options, read_config
from mingpt.distributed.process_group import init_distributed
from mingpt.utils.device import tune_malloc
from mingpt.utils.errors import UserError
from mingpt.utils.progress import run_script


def rows(name: str, bench: Bench) -> Iterator[Row]:
    """The rows of a measurement as they are made; where it can't be made, one that says why."""
    measurement = CASES[name]
    try:
        if bench.context.world_size > 1 and name not in MULTI_RANK_CASES:
            raise SkippedError("it is about one process, and these are several")
        yield from measurement(bench)
    except SkippedError as why:
        yield Row((measurement.__doc__ or name).split("\n")[0].rstrip("."), f"skipped: {why}")


def run(argv: Sequence[str]) -> None:
    """Measures and prints what the command line asks for.

    Raises:
        UserError: it asks for what is not there.
    """
    parser = build_parser()
    parser.description = __doc__
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure: {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    for rival in ("nanogpt", "tutorial"):
        parser.add_argument(f"--{rival}", type=Path, metavar="FOLDER", help="folder with its model.py")
    asked = parser.parse_intermixed_args(argv)
    config = read_config(words := config_options(asked))
    for name in asked.names:
        if name not in CASES:
            raise UserError(f"there is no measurement {name}; there are: {', '.join(CASES)}")
    for rival in ("nanogpt", "tutorial"):
        folder = getattr(asked, rival)
        if folder and not (folder / "model.py").is_file():
            raise UserError(f"--{rival}: there is no model.py in {folder}; name the folder of a clone")

    tune_malloc()
    with (
        tempfile.TemporaryDirectory() as folder,
        init_distributed(replace(config.distributed, strategy="fsdp")) as context,  # a group, be it of one rank
    ):
        bench = Bench(context, Path(folder), words, asked.nanogpt, asked.tutorial)
        speaks = context.rank == 0
        if speaks and not asked.json:
            print(
                f"## {machine()}\n\n| what | figure | smallest to largest | goal | command |\n|{' --- |' * 5}",
                flush=True,
            )
        for name in asked.names or CASES:
            clone = [f"--{BASELINE_OPTIONS[name]}", "FOLDER"] if name in BASELINE_OPTIONS else []
            command = shlex.join(["python", "bench.py", name, *clone, *words])
            for row in rows(name, bench):
                if speaks and asked.json:
                    more = {"name": name, "goal": row.goal, "met": row.met, "command": command, "machine": machine()}
                    print(json.dumps(asdict(row) | more), flush=True)
                elif speaks:
                    print(f"| {' | '.join([*row.cells, f'`{command}`'])} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(run))
