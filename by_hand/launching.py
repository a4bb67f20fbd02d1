"""Processes need their rank, the number of ranks and an address to form a group, whichever launcher starts them.

    python by_hand/launching.py

In this repository: `rendezvous` in mingpt/distributed/rendezvous.py
"""

import os
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_rank(rank, folder, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=f"{port}")
    ways = {
        "env://": {},  # the default; torchrun also sets RANK and WORLD_SIZE, so no arguments are needed
        "file://": {"init_method": f"file://{folder}/shared"},
        "tcp://": {"init_method": f"tcp://localhost:{port}"},
        "a store": {"store": dist.FileStore(f"{folder}/store", 2)},  # excludes init_method
    }
    for name, address in ways.items():
        dist.init_process_group("gloo", rank=rank, world_size=2, **address)
        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        assert total == 1 + 2
        if rank == 0:
            print(f"{name:8} {dist.get_world_size()} ranks, sum {total}")
        dist.destroy_process_group()


if __name__ == "__main__":  # not in the processes that `spawn` starts, which import this file
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]  # a free port
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, port), nprocs=2)  # the first argument is the rank
