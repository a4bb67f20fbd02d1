"""Chooses the number of CPU threads. Like the precision, the number is kept when a run resumes."""

import os
from contextlib import suppress
from pathlib import Path


def choose_threads(requested: int | str, local_world_size: int, saved: int | None) -> tuple[int, str]:
    """Chooses the number of CPU threads of this rank; returns the number and the reason.

    Args:
        requested: trainer.threads
        saved: number in the snapshot that training resumes from, if it had the same number of ranks
    """
    if isinstance(requested, int):
        threads = requested
        reason = "as configured"
    else:
        threads, reason = _threads_for_this_machine(local_world_size)
        # The saved number has precedence over OMP_NUM_THREADS, which torchrun sets to 1, because another number would
        # change the last bits.
        if saved == threads:
            reason = "kept from the snapshot"
        elif saved is not None:
            reason = f"kept from the snapshot, not {threads} ({reason}); set trainer.threads to change it"
            threads = saved
        reason = f"auto: {reason}"
    return threads, reason


def _threads_for_this_machine(local_world_size: int) -> tuple[int, str]:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal():
        return max(1, int(asked)), "OMP_NUM_THREADS"
    cores = float(len(available_cores()))
    with suppress(OSError, ValueError):  # not Linux, or no limit of CPU time
        # With more threads than a container's quota, all of them would be stopped for a part of each period.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    return max(1, int(cores // local_world_size)), f"{cores:g} cores / {local_world_size} ranks"


def available_cores() -> set[int]:
    """Returns the cores that this process may use: all cores of the machine, or those that it is bound to."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
