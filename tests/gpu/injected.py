"""main.py with an injected event, for tests that start it under torchrun.

    torchrun --standalone --nproc_per_node=2 -m tests.gpu.injected EVENT [OPTIONS OF main.py]

With SIGKILL or SIGSTOP, the last rank sends itself that signal in a step of the first start; with OOM, it makes an
allocation that fails. With WAITS, PyTorch warns about each call that waits for the GPU, except in the first steps and
in the last one.
"""

import os
import signal
import sys
from typing import Any

import torch

import main
from mingpt.program import exit_process, run_program
from trainer import Trainer

FAILS_AFTER = 8  # steps
WARMS_UP = 5  # steps that allocate memory, are recorded as CUDA graphs, or are compared with graphs

train_step = Trainer.train_step


def fail(trainer: Trainer) -> Any:
    context = trainer.context
    if trainer.progress.step == FAILS_AFTER and context.restart_count == 0:
        trainer.snapshots.newest_write.result()  # so that there is a snapshot to resume from
        if context.rank == context.world_size - 1:
            if EVENT == "OOM":
                torch.empty(2**50, dtype=torch.uint8, device=context.device)
            else:
                os.kill(os.getpid(), getattr(signal, EVENT))
    return train_step(trainer)


def warn_of_waits(trainer: Trainer) -> Any:
    if trainer.context.device.type == "cuda":
        is_watched = WARMS_UP <= trainer.progress.step < trainer.last_step - 1
        torch.cuda.set_sync_debug_mode("warn" if is_watched else "default")
    return train_step(trainer)


if __name__ == "__main__":
    EVENT, *sys.argv[1:] = sys.argv[1:]
    if EVENT == "WAITS":
        Trainer.train_step = warn_of_waits  # type: ignore[method-assign]
    else:
        Trainer.train_step = fail  # type: ignore[method-assign]
    exit_process(run_program(main.main, sys.argv[1:]))
