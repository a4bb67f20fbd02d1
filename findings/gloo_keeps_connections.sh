#!/usr/bin/env bash
# After a gloo rank is killed, only its neighbors in the ring have an error; the others wait until those exit, even if
# the neighbors destroy their process group.
#
# Version: PyTorch 2.13.0. An all-reduce of gloo passes data around a ring, so the loss of a rank breaks the connections
# of its two neighbors. destroy_process_group() in a rank that has an error (abort() and shutdown() of its backend, too)
# leaves its other connections open while its process lives.
#
# Programs that catch the error, to write a message or a snapshot before they exit, hold up all other ranks for as long
# as they need, one pair of neighbors after another, or until the timeout of the group, by default 30 minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/trial.py" <<'END'
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 5
PAUSE = 4.0  # seconds that a rank lives after its error


def run(rank, port, errors):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    x = torch.zeros(100_000)
    try:
        for step in range(10**9):
            if step == 100 and rank == RANKS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(x)
    except RuntimeError:
        errors.put((time.time(), rank))
        dist.destroy_process_group()
        time.sleep(PAUSE)


if __name__ == "__main__":
    print("PyTorch", torch.__version__)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    context = mp.get_context("spawn")
    errors = context.Queue()
    ranks = [context.Process(target=run, args=(rank, store.port, errors)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = sorted(errors.get(timeout=100) for _ in range(RANKS - 1))
    for process in ranks:
        process.join()
    first = found[0][0]
    for at, rank in found:
        print(f"rank {rank} has an error {at - first:4.1f} s after the first one")
    sys.exit(found[-1][0] - first < PAUSE)
END
"$folder/venv/bin/python" "$folder/trial.py"
