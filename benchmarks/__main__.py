"""Benchmarks compare the time of a step. "A / B 1.6" means that A takes 1.6 times as long as B.

    python -m benchmarks ab "--distributed.strategy zero1" "--distributed.strategy ddp" --ranks 2
    python -m benchmarks checkout FOLDER
    python -m benchmarks nanogpt FOLDER

A and B train in turn, in a process of their own each time. `ab` compares two lists of options of main.py, `checkout`
another checkout of this repository with this one, and `nanogpt` the model.py of nanoGPT in FOLDER with this program.
Further options are main.py's and apply to both sides.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mingpt.errors import UserError
from mingpt.monitoring.run_log import iter_metrics
from mingpt.program import run_program

ROOT = Path(__file__).parents[1]
DEFAULTS = "--trainer.sample_every null --trainer.save_overhead null --trainer.eval_windows 100"
MAIN = f"main.py {DEFAULTS}"
NANOGPT = "--model.bias false --optimizer.name adamw"  # what both programs have

Side = tuple[Path, str]  # a checkout, and a command line for Python in it


def choose_sides(words: Sequence[str], options: str) -> tuple[Side, Side]:
    """Returns A and B.

    Args:
        words: a benchmark and its arguments
        options: further options of main.py
    """
    match words:
        case ["ab", a, b]:
            return (ROOT, f"{MAIN} {options} {a}"), (ROOT, f"{MAIN} {options} {b}")
        case ["checkout", folder] if Path(folder, "main.py").is_file():
            return (Path(folder), f"{MAIN} {options}"), (ROOT, f"{MAIN} {options}")
        case ["nanogpt", folder] if Path(folder, "model.py").is_file():
            same = f"{DEFAULTS} {NANOGPT} {options}"
            return (ROOT, f"-m benchmarks.nanogpt {shlex.quote(folder)} {same}"), (ROOT, f"main.py {same}")
    raise UserError(f"command line: {shlex.join(words)} is not a benchmark; --help lists all")


def measure(side: Side, ranks: int, steps: int) -> float:
    """Trains twice as many steps, and returns the tokens per second of the second half.

    Raises:
        UserError: the run has failed.
    """
    checkout, command = side
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as run_dir:
        options = ["--trainer.run_dir", run_dir, f"--trainer.max_steps={2 * steps}", f"--trainer.log_every={steps}"]
        done = subprocess.run(
            [sys.executable, *launcher, *shlex.split(command), *options],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"{command}: {done.stderr}")
        rows = list(iter_metrics(Path(run_dir, "metrics.jsonl")))
    return [row["tokens_per_second"] for row in rows if row["event"] == "train"][-1]


def run(argv: Sequence[str]) -> None:
    """Runs a benchmark and prints a table.

    Raises:
        UserError: the command line is wrong, or a side has failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the lines of the examples
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="NAME", help="a benchmark with its arguments")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a side (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="measured steps of a run (default: %(default)s)")
    args, options = parser.parse_known_args(argv)
    a, b = choose_sides(args.words, shlex.join(options))
    speeds = [(measure(a, args.ranks, args.steps), measure(b, args.ranks, args.steps)) for _ in range(args.pairs)]
    low, median, high = np.quantile([of_b / of_a for of_a, of_b in speeds], (0.25, 0.5, 0.75))
    print("| A / B | median | quartiles |\n| --- | --- | --- |")
    print(f"| {' '.join(args.words)} | {median:.3g} | {low:.3g} to {high:.3g} |")


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:]))
