"""Benchmarks compare the time of a step. "A / B 1.6" means that A takes 1.6 times as long as B.

    python -m benchmarks ab "--distributed.strategy zero1" "--distributed.strategy ddp" --ranks 2
    python -m benchmarks ab "--trainer.save_overhead 0.02" "" --seconds 3
    python -m benchmarks bare
    python -m benchmarks nanogpt FOLDER
    python -m benchmarks tutorial FOLDER
    python -m benchmarks checkout FOLDER
    python -m benchmarks speed

A and B train alternately in separate processes. `ab` compares two lists of options of main.py. The others
compare this program with a loop without logs, checks and data loading, with the model.py of nanoGPT or of the
minGPT-DDP tutorial in FOLDER, or with another checkout of this repository. `speed` shows tokens per second for three
sizes of the model. Further options are main.py's and apply to both sides.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mingpt.config.parser import read_config
from mingpt.config.schema import MAX_STEPS
from mingpt.errors import UserError
from mingpt.program import exit_process, run_program
from mingpt.system.threads import available_cores

ROOT = Path(__file__).parents[1]
WARMUP_STEPS = 6  # the first steps are slower; on a GPU, the fourth one is recorded as CUDA graphs
# Only steps are measured, unless an option says otherwise.
DEFAULTS = (
    f"--trainer.max_steps {MAX_STEPS} --trainer.eval_every {MAX_STEPS} --trainer.save_every {MAX_STEPS} "
    "--trainer.sample_every null --trainer.save_overhead null"
)
SMALL = "--model.n_layer 4 --model.n_head 4 --model.n_embd 128 --data.block_size 64 --trainer.batch_size 12"
MEDIUM = "--model.n_layer 6 --model.n_head 6 --model.n_embd 384 --data.block_size 128 --trainer.batch_size 16"
LARGE = "--model.n_layer 12 --model.n_head 12 --model.n_embd 768 --data.block_size 128 --trainer.batch_size 16"
GPT2 = "--model.architecture gpt2 --model.bias false --optimizer.name adamw"


@dataclass(frozen=True)
class Program:
    """What a side of a comparison trains.

    Args:
        name: name in the table and in messages
        options: options of main.py
        kind: the argument PROGRAM of side.py
        checkout: folder of the code
    """

    name: str
    options: str
    kind: str = "main"
    checkout: Path = ROOT


class Side(subprocess.Popen[str]):
    """A process that trains as many steps as it is asked for, or several ranks of this program.

    Args:
        folder: where the run folder is created
    """

    def __init__(self, program: Program, folder: str, ranks: int) -> None:
        self.name = program.name
        if program.kind != "main":
            ranks = 1
        run_dir = tempfile.mkdtemp(dir=folder)
        words = [*DEFAULTS.split(), "--trainer.run_dir", run_dir, *shlex.split(program.options)]
        config = read_config(words)
        self.tokens_per_step = config.trainer.batch_size * config.data.block_size
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        threads = str(max(1, len(available_cores()) // ranks))  # else they might differ on a busy machine
        self.log = Path(run_dir, "log.txt")
        with open(self.log, "w") as log:
            super().__init__(
                [sys.executable, *launcher, str(program.checkout / "benchmarks/side.py"), program.kind, *words],
                env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": str(program.checkout)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def read(self) -> str:
        """Returns the next line that the process prints.

        Raises:
            UserError: the process has failed.
        """
        assert self.stdout is not None
        line = self.stdout.readline().strip()
        if not line:
            self.wait()
            log = self.log.read_text()
            message = re.search(r"error: (.+(\n  .+)*)", log)
            raise UserError(f"{self.name}: {message[1] if message else log}")
        return line

    def train(self, steps: int) -> float:
        """Returns the seconds that these steps take."""
        print(steps, file=self.stdin, flush=True)
        return float(self.read())


def choose_programs(words: Sequence[str], options: str) -> list[list[Program]]:
    """Returns the programs of each row, which are a pair to compare or one to measure.

    Args:
        words: a benchmark and its arguments
        options: further options of main.py
    """
    match words:
        case ["ab", a, b]:
            return [[Program(side or "default", f"{options} {side}") for side in (a, b)]]
        case ["bare"]:
            return [[Program("a bare loop", options, "bare"), Program("this program", options)]]
        case [_, folder] if not Path(folder, "model.py").is_file():
            raise UserError(f"command line: there is no model.py in {folder}; name the folder of a clone")
        case ["nanogpt" | "tutorial" as peer, folder]:
            runs = [f"{GPT2} {shape} {options}" for shape in (SMALL, MEDIUM)]
            return [[Program(peer, run, f"{peer}={folder}"), Program("this program", run)] for run in runs]
        case ["checkout", folder]:
            return [[Program(folder, options, checkout=Path(folder)), Program("this program", options)]]
        case ["speed"]:
            return [[Program("this program", f"{shape} {options}")] for shape in (SMALL, MEDIUM, LARGE)]
    raise UserError(f"command line: {shlex.join(words)} is not a benchmark; --help lists all")


def measure(sides: Sequence[Side], windows: int, seconds: float) -> np.ndarray:
    """Returns the seconds of a step, (windows, sides). The sides train alternately, each for about `seconds`."""
    for side in sides:
        side.train(WARMUP_STEPS)
    slowest = max(side.train(WARMUP_STEPS) for side in sides) / WARMUP_STEPS
    steps = max(1, round(seconds / slowest))
    return np.array([[side.train(steps) / steps for side in sides] for _ in range(windows)])


def print_row(what: str, values: np.ndarray) -> None:
    """Prints median and quartiles."""
    quartiles = np.quantile(values, (0.25, 0.5, 0.75))
    low, median, high = (f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in quartiles)
    print(f"| {what} | {median} | {low} to {high} |", flush=True)


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
    parser.add_argument("--pairs", type=int, default=15, help="measurements of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a measurement (default: %(default)s)")
    args, options = parser.parse_known_args(argv)
    rows = choose_programs(args.words, shlex.join(options))
    print("| measurement | median | quartiles |\n| --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for programs in rows:
            with ExitStack() as stack:
                sides = []
                for program in programs:
                    side = stack.enter_context(Side(program, folder, args.ranks))
                    description = side.read()  # the next side starts on an idle machine
                    sides.append(side)
                seconds = measure(sides, args.pairs, args.seconds)
                if len(sides) == 1:
                    print_row(f"tokens per second, {description}", sides[0].tokens_per_step / seconds)
                else:
                    a, b = sides
                    print_row(f"{a.name} / {b.name}, {description}", seconds[:, 0] / seconds[:, 1])


if __name__ == "__main__":
    exit_process(run_program(run, sys.argv[1:]))
