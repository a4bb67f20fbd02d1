"""Entry point: reads the configuration, sets up the process group, builds the Trainer, and returns the exit status.

python main.py [--config FILE] [--section.key VALUE ...]
torchrun --standalone --nproc_per_node=2 main.py [the same options]
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from mingpt.system.signals import start_program

if __name__ == "__main__":
    start_program()

from mingpt.config.parser import read_config
from mingpt.config.schema import Config
from mingpt.distributed.launcher import RankInfo, detect_launch_environment
from mingpt.errors import PeerError
from mingpt.monitoring.logging import set_rank
from mingpt.program import exit_process, import_pytorch, run_program

if TYPE_CHECKING:
    from mingpt.distributed.context import DistributedContext


def main(argv: Sequence[str] = ()) -> int:
    """Trains as configured. Returns the exit status.

    Args:
        argv: the command line without the program's name

    Raises:
        UserError: there is a mistake in the configuration, the environment or a file.
        PeerError: another rank has failed.
    """
    info = detect_launch_environment(os.environ)  # rank and number of ranks, set by torchrun, SLURM, mpirun or by hand
    set_rank(info.rank, info.local_rank)  # one process of each machine reports mistakes
    config = read_config(argv)
    with process_group(config, info) as context:
        from trainer import Trainer  # not at the top, since it imports PyTorch

        return Trainer(config, context).train()


@contextmanager
def process_group(config: Config, info: RankInfo) -> "Iterator[DistributedContext]":
    """Sets up the process group for the block, and destroys it afterwards unless the block fails.

    A single process gets a process group only if its strategy is FSDP.

    Raises:
        UserError: the other ranks did not connect, there are fewer GPUs than ranks, or nccl is set without a GPU.
        PeerError: another rank caused an error in the block.
    """
    import_pytorch()  # takes over a second, so `--help` and mistakes in the configuration are answered without it
    import torch.distributed as dist

    from mingpt.distributed.context import DistributedContext
    from mingpt.distributed.process_group import connect, destroy_process_group, explain
    from mingpt.system.device import use_cuda

    destroy_process_group()  # of an earlier run in this process that has failed
    store = connect(config, info) if info.world_size > 1 else dist.HashStore()
    if info.world_size > 1 or config.distributed.uses_fsdp:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda(config.distributed.backend) else "gloo",
            store=dist.PrefixStore("group", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=config.distributed.timeout_seconds),
        )
    try:
        yield DistributedContext(info, config.distributed)
    except Exception as error:
        if info.world_size > 1 and (cause := explain(dist.PrefixStore("errors", store), info, error)):
            raise PeerError(f"{cause}; the same command resumes") from error
        raise
    destroy_process_group()


if __name__ == "__main__":
    exit_process(run_program(main, sys.argv[1:]))
