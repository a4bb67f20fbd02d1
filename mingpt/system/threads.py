"""Chooses the number of CPU threads. Like the precision, the number is kept when a run resumes."""

import os
from contextlib import suppress
from pathlib import Path

import psutil


def choose_threads(requested: int | str, local_world_size: int, saved: int | None) -> tuple[int, str]:
    """Chooses the number of CPU threads of this rank; returns the number and the reason.

    All ranks must call it at the same time, so that none counts the work of another.

    Args:
        requested: trainer.threads
        saved: number in the snapshot that training resumes from, if it had the same number of ranks
    """
    if isinstance(requested, int):
        return requested, "as configured"
    if saved is not None:  # also if OMP_NUM_THREADS is set, as torchrun does: another number would change the last bits
        return saved, "auto: kept from the snapshot"
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal():
        return max(1, int(asked)), "auto: OMP_NUM_THREADS"
    # All cores of the machine, or those that this process is bound to
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    used = psutil.cpu_percent(0.1, percpu=True)  # by other programs
    cores = round(sum(1 - percent / 100 for core, percent in enumerate(used) if core in available))
    with suppress(OSError, ValueError):  # not Linux, or no limit of CPU time
        # With more threads than a container's quota, all of them would be stopped for a part of each period.
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, quota // period)
    return max(1, cores // local_world_size), f"auto: {cores} idle cores / {local_world_size} ranks"
