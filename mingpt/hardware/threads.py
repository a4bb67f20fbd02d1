"""The choice of the number of CPU threads. Like that of the precision, it is kept in a run that resumes."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mingpt.config import MAX_THREADS
from mingpt.errors import UserError
from mingpt.hardware.cgroup import cpu_limit

STAT_FILE = Path("/proc/stat")


def choose_threads(requested: int | str, local_world_size: int, saved: int | None) -> tuple[int, str]:
    """Chooses the number of CPU threads of this rank; returns it and the reason.

    `saved` is that of the snapshot that training resumes from, if the number of ranks is the same.
    """
    if isinstance(requested, int):
        return requested, "as asked"
    threads, reason = _threads_for_this_machine(local_world_size)
    # The saved number comes before OMP_NUM_THREADS, which torchrun sets to 1 by itself, and before what other programs
    # leave of the cores now: with another number the last bits would differ.
    if saved == threads:
        return saved, "auto: kept from the snapshot"
    if saved is not None:
        return saved, f"auto: kept from the snapshot, not {threads} ({reason}); set trainer.threads to change it"
    return threads, f"auto: {reason}"


def _threads_for_this_machine(local_world_size: int) -> tuple[int, str]:
    asked = omp_num_threads(os.environ)
    if asked is not None:
        return asked, "OMP_NUM_THREADS"
    cores = available_cores()
    free = cores - busy_cores()
    shared = f"{cores} cores" if free == cores else f"{free} idle of {cores} cores"
    quota = cpu_limit()
    if quota is not None and quota < free:
        # More threads than the quota would be stopped together for a part of each period.
        free = int(quota)
        shared = f"a CPU quota of {quota:g} cores"
    return max(1, free // local_world_size), f"{shared} / {local_world_size} ranks"


def available_cores() -> int:
    """How many cores this process may use, which is fewer than the machine has if it is bound to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores() -> int:
    """How many of the available cores other programs use now: their CPU time over 0.03 seconds, rounded.

    If there are any, it looks for 0.5 seconds more, since that may have been for a moment only. All ranks call it at
    the same time, so that none counts the work of another.
    """
    ticks = _busy_ticks()
    began = time.monotonic()
    busy = 0
    for seconds in (0.03, 0.5):
        time.sleep(seconds)
        elapsed = (time.monotonic() - began) * os.sysconf("SC_CLK_TCK")
        busy = round((_busy_ticks() - ticks) / elapsed)
        if busy == 0:
            break
    return min(busy, available_cores())


def _busy_ticks() -> int:
    """Clock ticks that the available cores have worked since the system started; 0 on other systems than Linux.

    They are SC_CLK_TCK a second, from /proc/stat (proc_stat(5)).
    """
    if not STAT_FILE.exists():
        return 0
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in STAT_FILE.read_text().splitlines():
        name, *counters = line.split()
        if name in names:
            _, _, _, idle, iowait, *_ = counters
            ticks += sum(map(int, counters[:8])) - int(idle) - int(iowait)  # the others are part of these eight
    return ticks


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
