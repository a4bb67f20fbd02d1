"""One rank does not call a collective. The others wait until the timeout, and the error does not name that rank.

    torchrun --standalone --nproc_per_node=2 by_hand/hang.py

In this repository: `explain` in mingpt/distributed/process_group.py
"""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))  # 30 minutes by default
if dist.get_rank() == 1:
    time.sleep(5)  # it is alive, but does not call the collective
else:
    message = ""
    try:
        dist.barrier()  # returns only after all ranks have called it
    except RuntimeError as error:
        message = str(error).partition("] ")[2]  # without the source line in gloo
    print(message)
    assert "rank" not in message
dist.destroy_process_group()
