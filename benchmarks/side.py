"""One side of a comparison, or one of its ranks. It trains as many steps as are requested on stdin.

    python benchmarks/side.py PROGRAM [options of main.py]

PROGRAM is main or nanogpt=FOLDER. Rank 0 reads a number of steps per line and prints the seconds
that they have taken. Its first line describes the run.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch

from benchmarks.nanogpt import nanogpt_step
from mingpt.config.parser import read_config
from mingpt.distributed.agreement import broadcast_object
from mingpt.distributed.launcher import detect_launch_environment
from mingpt.distributed.process_group import process_group
from mingpt.monitoring.logging import set_rank
from mingpt.program import exit_process, run_program
from mingpt.system.device import device_kind
from trainer import Trainer


def run(argv: Sequence[str]) -> None:
    program, *options = argv
    info = detect_launch_environment(os.environ)
    set_rank(info.rank, info.local_rank)
    config = read_config(options)
    answers = sys.stdout
    with redirect_stdout(sys.stderr), process_group(config, info) as context:
        trainer = Trainer(config, context)
        if program == "main":
            trainer.start_log()
            step = trainer.advance
        else:
            step = nanogpt_step(trainer, Path(program.removeprefix("nanogpt=")))
        answer: object = describe(trainer)
        while True:
            if context.rank == 0:
                print(answer, file=answers, flush=True)
            line = sys.stdin.readline() if context.rank == 0 else ""
            steps = broadcast_object(context, line)
            if not steps:
                break
            answer = time_steps(step, int(steps), context.device)


def describe(trainer: Trainer) -> str:
    """Returns sizes, precision, ranks and device."""
    model = trainer.model_config
    return (
        f"{model.n_layer} layers {model.n_embd} wide, T {model.block_size}, "
        f"batch {trainer.config.trainer.batch_size}, {trainer.numerics.precision}, "
        f"{trainer.context.world_size} x {torch.get_num_threads()} threads, {device_kind(trainer.context.device)}"
    )


def time_steps(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Returns the seconds of these steps, including the work that they start on a GPU."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    exit_process(run_program(run, sys.argv[1:]))
