"""Entry point: reads the configuration, sets up the process group, builds the Trainer, and returns the exit status.

python main.py [--config FILE] [--section.key VALUE ...]
torchrun --standalone --nproc_per_node=2 main.py [the same options]
"""

import os
import sys
from collections.abc import Sequence

from mingpt.system.signals import start_program

if __name__ == "__main__":
    start_program()

from mingpt.config.parser import read_config
from mingpt.distributed.launcher import detect_launch_environment
from mingpt.monitoring.logging import set_rank
from mingpt.program import exit_process, import_pytorch, run_program


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
    import_pytorch()  # takes over a second, so `--help` and mistakes in the configuration are answered without it
    from mingpt.distributed.process_group import process_group
    from trainer import Trainer

    with process_group(config, info) as context:
        return Trainer(config, context).train()


if __name__ == "__main__":
    exit_process(run_program(main, sys.argv[1:]))
