"""Chooses the number of CPU threads. Like the precision, the number is kept when a run resumes."""

import os
from contextlib import suppress

import psutil

from mingpt.system.cgroup import cpu_limit


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
        # The saved number has precedence over OMP_NUM_THREADS, which torchrun sets to 1, and over the cores that are
        # idle, because another number would change the last bits.
        if saved == threads:
            reason = "kept from the snapshot"
        elif saved is not None:
            reason = f"kept from the snapshot, not {threads} ({reason}); set trainer.threads to change it"
            threads = saved
        reason = f"auto: {reason}"
    # Matrix products in bf16 are wrong if OpenMP starts fewer threads than PyTorch asks for (PyTorch 2.13, oneDNN: of
    # 120 gradients, 86 were not finite, and 34 were finite but wrong by more than 5 percent).
    limit = _omp_number("OMP_THREAD_LIMIT") or threads
    if limit < threads:
        return limit, f"OpenMP's limit from the environment, not {threads}: {reason}"
    return threads, reason


def _threads_for_this_machine(local_world_size: int) -> tuple[int, str]:
    asked = _omp_number("OMP_NUM_THREADS")
    if asked is not None:
        return asked, "OMP_NUM_THREADS"
    cores = len(available_cores())
    free = cores - busy_cores()
    shared = f"{cores} cores" if free == cores else f"{free} idle of {cores} cores"
    quota = cpu_limit()
    if quota is not None and quota < free:
        # With more threads than the quota, all of them would be stopped for a part of each period.
        free = int(quota)
        shared = f"a CPU quota of {quota:g} cores"
    return max(1, free // local_world_size), f"{shared} / {local_world_size} ranks"


def available_cores() -> set[int]:
    """Returns the cores that this process may use: all cores of the machine, or those that it is bound to."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def busy_cores() -> int:
    """Returns the rounded number of available cores that other programs use now.

    It measures for 0.03 seconds, and for another 0.5 if it finds busy cores, which may be busy for a moment only.
    All ranks must call it at the same time, so that no rank counts the work of another.
    """
    available = available_cores()
    for seconds in (0.03, 0.5):
        percentages = psutil.cpu_percent(seconds, percpu=True)
        busy = round(sum(used for core, used in enumerate(percentages) if core in available) / 100)
        if busy == 0:
            break
    return busy


def _omp_number(name: str) -> int | None:
    """Returns the number of threads in a variable of OpenMP, or None if OpenMP ignores the variable."""
    first = os.environ.get(name, "").split(",")[0]  # a list has a number for each nested level
    with suppress(ValueError):
        return max(0, int(first)) or None
    return None
