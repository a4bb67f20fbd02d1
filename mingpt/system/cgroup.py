"""Limits that containers, SLURM and systemd set: those of this process's cgroup and of all above it, in Linux.

They are read from cgroups of version 2: the kernel's admin-guide/cgroup-v2.rst.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the lowest limit of memory in bytes; None if there is none.

    Args:
        root: of the file system
    """
    return min((int(limit) for [limit] in _limits("memory.max", root)), default=None)


def cpu_limit(root: Path = ROOT) -> float | None:
    """Returns the lowest quota of CPU time in cores, such as 1.5; None if there is none."""
    # Microseconds of CPU time in each period, and the period
    return min((int(quota) / int(period) for quota, period in _limits("cpu.max", root)), default=None)


def _limits(name: str, root: Path) -> Iterator[list[str]]:
    """Yields the words of each file of this name that sets a limit."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        version, _, path = line.partition("::/")
        if version != "0":
            continue
        # Without a namespace, a container sees the host's path, and its own cgroup is the root that it sees.
        folder = mount / path
        for parent in [folder, *folder.parents]:
            words = " ".join(_lines(parent / name)).split()
            if parent.is_relative_to(mount) and words and words[0] != "max":
                yield words


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # another system than Linux
        return []
