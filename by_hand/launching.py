"""To form a group, processes need their rank, the number of ranks and an address, whichever launcher starts them.

    python by_hand/launching.py

In this repository: `rendezvous` in mingpt/distributed/rendezvous.py
"""

import os
import socket
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def join(name, **address):
    dist.init_process_group("gloo", **address)
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{name:18} {dist.get_world_size()} ranks, sum {total}")
    dist.destroy_process_group()


def run_rank(rank, folder, port):
    numbers = {"rank": rank, "world_size": 2}
    join("spawn, file://", init_method=f"file://{folder}/shared", **numbers)
    join("spawn, tcp://", init_method=f"tcp://localhost:{port}", **numbers)
    store = dist.FileStore(f"{folder}/store", 2)
    join("spawn, a store", store=store, **numbers)  # instead of init_method


if "RANK" in os.environ:  # one of the subprocesses below
    join("subprocess, env://")  # the default: all arguments are in the environment, like torchrun's
elif __name__ == "__main__":  # not in the processes that `spawn` starts, which import this file
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]  # a free port
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, port), nprocs=2)  # the first argument is the rank
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen(command, env=environment | {"RANK": f"{rank}"}) for rank in range(2)]
    for process in ranks:
        process.wait()
