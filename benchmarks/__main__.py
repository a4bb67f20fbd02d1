"""Benchmarks compare the time of a step. "A / B 1.6" means that A takes 1.6 times as long as B.

    python -m benchmarks ab "--distributed.strategy zero1" "--distributed.strategy ddp" --ranks 2
    python -m benchmarks ab "--trainer.save_overhead 0.02" "" --seconds 3
    python -m benchmarks nanogpt FOLDER
    python -m benchmarks checkout FOLDER

A and B train alternately in separate processes. `ab` compares two lists of options of main.py. The others
compare this program with the model.py of nanoGPT in FOLDER, or with another checkout of this repository.
Further options are main.py's and apply to both sides.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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


def choose_programs(words: Sequence[str], options: str) -> list[tuple[Program, Program]]:
    """Returns the pairs to compare, one for each row.

    Args:
        words: a benchmark and its arguments
        options: further options of main.py
    """
    match words:
        case ["ab", a, b]:
            return [(Program(a or "default", f"{options} {a}"), Program(b or "default", f"{options} {b}"))]
        case [_, folder] if not Path(folder, "model.py").is_file():
            raise UserError(f"command line: there is no model.py in {folder}; name the folder of a clone")
        case ["nanogpt", folder]:
            runs = [f"{GPT2} {shape} {options}" for shape in (SMALL, MEDIUM)]
            return [(Program("nanogpt", run, f"nanogpt={folder}"), Program("this program", run)) for run in runs]
        case ["checkout", folder]:
            return [(Program(folder, options, checkout=Path(folder)), Program("this program", options))]
    raise UserError(f"command line: {shlex.join(words)} is not a benchmark; --help lists all")


def measure(sides: Sequence[Side], windows: int, seconds: float) -> np.ndarray:
    """Returns the seconds of a step, (windows, sides). The sides train alternately, each for about `seconds`."""
    for side in sides:
        side.train(WARMUP_STEPS)
    slowest = max(side.train(WARMUP_STEPS) for side in sides) / WARMUP_STEPS
    steps = max(1, round(seconds / slowest))
    return np.array([[side.train(steps) / steps for side in sides] for _ in range(windows)])


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
    pairs = choose_programs(args.words, shlex.join(options))
    print("| A / B | median | quartiles |\n| --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for a, b in pairs:
            with Side(a, folder, args.ranks) as side_a:
                side_a.read()  # B starts on an idle machine
                with Side(b, folder, args.ranks) as side_b:
                    description = side_b.read()
                    seconds = measure((side_a, side_b), args.pairs, args.seconds)
            low, median, high = np.quantile(seconds[:, 0] / seconds[:, 1], (0.25, 0.5, 0.75))
            print(f"| {a.name} / {b.name}, {description} | {median:.3g} | {low:.3g} to {high:.3g} |", flush=True)


if __name__ == "__main__":
    exit_process(run_program(run, sys.argv[1:]))
