"""Makes OpenMP's threads sleep instead of spin while other programs use the cores.

A thread that waits at the end of a parallel region spins for some milliseconds, since sleeping and waking up would take
longer than most regions. If another program takes a core, threads use up their share of it by spinning. So they rarely
all run at the same time, and each region waits for a thread that has lost its core: with one other program on two
cores, a step takes four times as long (https://github.com/pytorch/pytorch/issues/80777). Threads that sleep soon leave
the cores to others and get them back when they wake up. The results have the same bits.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from mingpt.distributed.context import DistributedContext
from mingpt.monitoring.logging import logger
from mingpt.system.threads import available_cores

TASKS = Path("/proc/self/task")
CHECK_SECONDS = 1.0
# Bounds for the average number of this process's threads that wait for a core. It is 0.02 on an idle machine. On two
# cores with another program that is always busy, it is 0.7 if threads spin, and 0.5 if they sleep. Below 0.6, spinning
# is faster.
SLOW = 0.3
PASSIVE = 0.6
PASSIVE_SECONDS = 30.0  # then threads spin again, to see whether they still wait for cores
WARN_AFTER_SECONDS = 10.0
WARN_AGAIN_SECONDS = 600.0
GRAIN_SIZE = 32768  # PyTorch uses another thread for each GRAIN_SIZE elements (at::internal::GRAIN_SIZE)


@contextmanager
def adaptive_wait_policy(context: DistributedContext) -> Iterator[None]:
    """Context manager that lets threads sleep instead of spin while other programs use the cores.

    It warns when that has lasted for some seconds. It does nothing on systems other than Linux.
    """
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=[ended, context], daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(ended: threading.Event, context: DistributedContext) -> None:
    threads = torch.get_num_threads()
    # If ranks have more threads than there are cores, they wait for each other.
    warns = context.local_rank == 0 and context.local_world_size * threads <= len(available_cores())
    calm = next_warning = time.monotonic()
    while not ended.is_set():
        waiting = _threads_that_wait(ended, CHECK_SECONDS)
        if waiting > PASSIVE and threads > 1:
            with passive_wait_policy():
                waiting = _threads_that_wait(ended, PASSIVE_SECONDS)
        now = time.monotonic()
        if waiting < SLOW:
            calm = now
        elif warns and now >= max(calm + WARN_AFTER_SECONDS, next_warning):
            next_warning = now + WARN_AGAIN_SECONDS
            advice = "; a new run with fewer trainer.threads may be faster" if threads > 1 else ""
            logger.warning(f"training is slow, because other programs use its CPU cores{advice}")


def _threads_that_wait(ended: threading.Event, seconds: float) -> float:
    """Returns how many threads of this process wait for a core, on average over these seconds."""
    began = time.monotonic()
    before = runqueue_seconds()
    ended.wait(seconds)
    after = runqueue_seconds()
    waited = sum(after[task] - before[task] for task in after.keys() & before.keys())
    return waited / (time.monotonic() - began)


def runqueue_seconds() -> dict[str, float]:
    """Returns how many seconds each thread of this process was ready to run, but waited for a core.

    Linux's scheduler counts them (Documentation/scheduler/sched-stats.rst). Waiting for memory, a file or another rank
    does not count, and neither does a stopped thread. Without these statistics, the result is empty.
    """
    waits = {}
    for file in TASKS.glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            _, nanoseconds, _ = file.read_text().split()
            waits[file.parent.name] = int(nanoseconds) / 1e9
    return waits


@contextmanager
def passive_wait_policy() -> Iterator[None]:
    """Context manager during which threads spin for only some microseconds before they sleep.

    OpenMP does not have a function for that. libgomp does it as long as there are more threads than cores (its manual
    on GOMP_SPINCOUNT), so this keeps a second team of threads, which sleep.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:  # OpenMP keeps a thread's team until the thread ends
        executor.submit(_make_team, len(available_cores()) + 1).result()
        yield


def _make_team(size: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(size)
    torch.ones(size * GRAIN_SIZE)  # the team fills it
    torch.set_num_threads(threads)  # threads that start later begin with this number
