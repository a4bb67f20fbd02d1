"""Benchmarks: ratios of times, measured alternately in one run on this machine. "A / B 1.6": A takes 1.6 times as long.

    python -m benchmarks
    python -m benchmarks trainer snapshots --model.n_embd 256
    python -m benchmarks nanogpt tutorial --nanogpt FOLDER --tutorial FOLDER
    torchrun --standalone --nproc_per_node=2 -m benchmarks strategies reduction pipeline
    torchrun --standalone --nproc_per_node=4 -m benchmarks collectives

Without names, it runs all cases except collectives and time_to_loss, which take long. The cases strategies, reduction,
pipeline and collectives need several ranks, and the others a single process. FOLDER contains the model.py of nanoGPT or
of the minGPT-DDP tutorial. Other options are main.py's, and apply to every case.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cases import BASELINES, CASES, LONG_CASES, MULTI_RANK_CASES
from benchmarks.harness import Bench, Row, machine_name
from main import process_group
from mingpt.config.parser import build_parser, config_options, read_config
from mingpt.distributed.launcher import detect_launch_environment, reported_once_per_machine
from mingpt.errors import UserError
from mingpt.program import exit_process, run_program
from mingpt.system.device import tune_malloc
from mingpt.system.torch_versions import check_torch_version


def run_case(name: str, bench: Bench) -> Iterator[Row]:
    """Yields the rows of a case as soon as they are measured, or a row with the reason if it is skipped."""
    if bench.context.world_size > 1 and name not in MULTI_RANK_CASES:
        yield Row(name, "skipped: it runs in a single process")
    elif bench.context.world_size == 1 and name in MULTI_RANK_CASES:
        yield Row(name, "skipped: it needs several ranks, for example of torchrun")
    elif name in BASELINES and bench.baselines[BASELINES[name]] is None:
        yield Row(name, "skipped: its folder is not given")
    else:
        try:
            yield from CASES[name](bench)
        except UserError as error:  # options that conflict with this case
            yield Row(name, f"skipped: {error}")


def run(argv: Sequence[str]) -> None:
    """Runs the cases on the command line and prints their rows.

    Raises:
        UserError: a case or folder does not exist, or an option of main.py is wrong.
    """
    parser = build_parser()
    parser.prog = "python -m benchmarks"
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of the examples
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cases: {', '.join(CASES)}")
    for baseline in ("nanogpt", "tutorial"):
        parser.add_argument(f"--{baseline}", type=Path, metavar="FOLDER", help="folder of its model.py")
    info = detect_launch_environment(os.environ)
    with reported_once_per_machine(info):
        args = parser.parse_intermixed_args(argv)
        options = config_options(args)
        config = read_config(options)
        check_torch_version()
        for name in args.names:
            if name not in CASES:
                raise UserError(f"there is no benchmark {name}; there are: {', '.join(CASES)}")
        baselines = {"nanogpt": args.nanogpt, "tutorial": args.tutorial}
        for name, folder in baselines.items():
            if folder and not (folder / "model.py").is_file():
                raise UserError(f"--{name}: there is no model.py in {folder}; name the folder of a clone")

    tune_malloc()
    with tempfile.TemporaryDirectory() as folder, process_group(config, info) as context:
        bench = Bench(context, Path(folder), options, baselines)
        if context.rank == 0:
            header = "| name | measurement | median | range |\n| --- | --- | --- | --- |"
            print(f"## {machine_name(context.device)}\n\n{header}", flush=True)
        for name in args.names or [name for name in CASES if name not in LONG_CASES]:
            for row in run_case(name, bench):
                if context.rank == 0:
                    print(f"| `{name}` | {' | '.join(row.cells)} |", flush=True)


if __name__ == "__main__":
    exit_process(run_program(run, sys.argv[1:]))
