"""The choice of the number of CPU threads. Like that of the precision, it is kept in a run that resumes."""

import os
from collections.abc import Mapping

from mingpt.config import MAX_THREADS
from mingpt.errors import UserError
from mingpt.hardware.cgroup import cpu_limit


def choose_threads(requested: int | str, local_world_size: int, saved: int | None) -> tuple[int, str]:
    """Chooses the number of CPU threads of this rank; returns it and the reason.

    `saved` is that of the snapshot that training resumes from, if the number of ranks is the same.
    """
    if isinstance(requested, int):
        return requested, "as asked"
    asked = omp_num_threads(os.environ)
    if saved is not None:
        # Before OMP_NUM_THREADS, which torchrun sets to 1 by itself: with another number the last bits would differ.
        reason = "auto: kept from the snapshot"
        if asked not in (None, saved):
            reason += f", not {asked} as OMP_NUM_THREADS says; set trainer.threads to change it"
        return saved, reason
    if asked is not None:
        return asked, "auto: OMP_NUM_THREADS"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = f"{cores} cores"
    quota = cpu_limit()
    if quota is not None and quota < cores:
        # More threads than the quota would be stopped together for a part of each period.
        cores = int(quota)
        shared = f"a CPU quota of {quota:g} cores"
    return max(1, cores // local_world_size), f"auto: {shared} / {local_world_size} ranks"


def omp_num_threads(env: Mapping[str, str]) -> int | None:
    """Returns the number of threads that OMP_NUM_THREADS asks for; None if it is not set, empty or 0.

    Raises:
        UserError: it is no number, or more threads than MAX_THREADS.
    """
    text = env.get("OMP_NUM_THREADS", "")
    first = text.split(",")[0]  # a list has a number for each level of nesting
    try:
        threads = int(first or "0")
    except ValueError:
        threads = -1
    if not 0 <= threads <= MAX_THREADS:
        raise UserError(
            f"environment: OMP_NUM_THREADS is {text!r}, must be a whole number of threads, at most {MAX_THREADS}"
        )
    return threads or None
