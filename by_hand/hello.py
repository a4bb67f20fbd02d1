"""A process group: torchrun starts processes, passes each its rank in environment variables, and they connect.

    torchrun --standalone --nproc_per_node=2 by_hand/hello.py --name Ada

In this repository: `detect_launch_environment` in mingpt/distributed/launcher.py

Options before the script's name are for torchrun, and options after it for the script. On two machines, start torchrun
on each (docs/launchers.md).
"""

import os
import sys

import torch.distributed as dist

SET_BY_TORCHRUN = """\
RANK={RANK} WORLD_SIZE={WORLD_SIZE} LOCAL_RANK={LOCAL_RANK} LOCAL_WORLD_SIZE={LOCAL_WORLD_SIZE} GROUP_RANK={GROUP_RANK}
    MASTER_ADDR={MASTER_ADDR} TORCHELASTIC_USE_AGENT_STORE={TORCHELASTIC_USE_AGENT_STORE}"""

# Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and returns when all ranks have called it.
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()

rows = [""] * n
dist.all_gather_object(rows, SET_BY_TORCHRUN.format_map(os.environ))
if rank == 0:
    print(*rows, sep="\n")
    print("options of the script:", *sys.argv[1:])
dist.destroy_process_group()
