"""Entry point: reads the configuration, sets up the process group, builds the Trainer, returns the exit status.

python main.py [--config FILE] [--section.key VALUE ...]
torchrun --standalone --nproc_per_node=2 main.py [the same options]
"""

import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta

if __name__ == "__main__" and not hasattr(sys, "ps1"):  # a session, by %run, continues
    # Ctrl-C before training. During imports, a KeyboardInterrupt shows its traceback, and NumPy's makes other errors.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

from mingpt.config.parser import read_config
from mingpt.distributed.launcher import (
    allow_connections,
    detect_launch_environment,
    reported_once_per_machine,
)
from mingpt.program import exit_process, paused_garbage_collection, run_program
from mingpt.system.signals import record_launcher


def main(argv: Sequence[str] = ()) -> int:
    """Trains as configured; returns the exit status.

    Args:
        argv: the command line without the program's name

    Raises:
        UserError: the user can correct it, in the configuration, in the environment or in a file.
        PeerError: another rank has failed.
    """
    record_launcher()
    info = detect_launch_environment(os.environ)  # rank and number of ranks, from torchrun, SLURM, mpirun or by hand
    with reported_once_per_machine(info):
        config = read_config(argv)
        allow_connections(info)

    # Importing PyTorch takes over a second, so `--help` and a mistake in the configuration are answered before.
    with paused_garbage_collection():
        from mingpt.files import check_temporary_folder
        from mingpt.system.torch_versions import check_torch_version

        with reported_once_per_machine(info):
            check_temporary_folder()
            check_torch_version()  # before imports that other versions may not have

        import torch.distributed as dist

        from mingpt.distributed.context import DistributedContext
        from mingpt.distributed.process_group import connected_ranks, destroy_process_group, explained_errors
        from mingpt.monitoring.logging import set_rank
        from mingpt.run.start import prepare_run
        from mingpt.system.device import use_cuda
        from trainer import Trainer

    set_rank(info.rank)
    destroy_process_group()  # if an earlier run in this process has failed
    backend = "cpu:gloo,cuda:nccl" if use_cuda(config.distributed.backend) else "gloo"
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    health = None
    if info.world_size > 1:
        with connected_ranks(info, config.distributed, config.trainer.run_dir, backend) as (store, health):
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    elif config.distributed.uses_fsdp:  # needs a group on a single process, too
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

    with explained_errors(info, health):  # an error whose cause is another rank names that rank
        context = DistributedContext(info, config.distributed, health)
        prepare_run(config, context)
        status = Trainer(config, context).train()
    destroy_process_group()
    return status


if __name__ == "__main__":
    exit_process(run_program(main, sys.argv[1:]))
