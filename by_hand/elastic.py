"""A counter that survives a kill: torchrun starts all ranks again, and they continue from the newest snapshot.

    torchrun --standalone --nproc_per_node=2 --max_restarts=1 by_hand/elastic.py

In this repository: `SnapshotManager.load_newest` in mingpt/snapshot/manager.py
"""

import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist

restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
# The id is the same in all restarts of a torchrun.
snapshot = f"{tempfile.gettempdir()}/counter-{os.environ['TORCHELASTIC_RUN_ID']}.pt"
rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

# torchrun's store still contains the addresses of the previous ranks, so each start uses different keys.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
dist.init_process_group("gloo", store=dist.PrefixStore(restart, store), rank=rank, world_size=n)
step = 0
total = torch.tensor(0)
if os.path.exists(snapshot):
    step, total = torch.load(snapshot)
while step < 4:
    step += 1
    summand = torch.tensor(step)
    try:
        dist.all_reduce(summand)
    except RuntimeError:  # rank 0 is dead
        sys.exit(1)  # torchrun starts all ranks again
    total += summand
    if rank == 0:
        print(f"restart {restart}: step {step}, total {total}", flush=True)
        if step % 2 == 0:
            torch.save((step, total), snapshot + ".partial")
            os.replace(snapshot + ".partial", snapshot)  # so that a file with this name is always complete
        if step == 3 and restart == "0":
            os.kill(os.getpid(), signal.SIGKILL)
assert total == n * (1 + 2 + 3 + 4)  # step 3 ran twice, but counts once
if rank == 0:
    os.remove(snapshot)
dist.destroy_process_group()
