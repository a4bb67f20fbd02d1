"""Limits set by containers, SLURM and systemd: the limits of this process's cgroup and of its ancestors, on Linux.

They are read from cgroups of version 2 (admin-guide/cgroup-v2.rst in the kernel's documentation).
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_limit() -> float | None:
    """Returns the lowest quota of CPU time in cores, such as 1.5, or None if there is no quota."""
    # cpu.max has the microseconds of CPU time per period, and the period.
    return min((int(quota) / int(period) for quota, period in _limits("cpu.max")), default=None)


def _limits(name: str) -> Iterator[list[str]]:
    """Yields the words of each file with this name that sets a limit."""
    mount = ROOT / "sys/fs/cgroup"
    for path in re.findall("^0::/(.*)", _read(ROOT / "proc/self/cgroup"), re.MULTILINE):
        # In a container without a cgroup namespace, the path is the host's, and the container's cgroup is at the mount.
        folder = mount / path
        for parent in [folder, *folder.parents]:
            words = _read(parent / name).split()
            if parent.is_relative_to(mount) and words and words[0] != "max":
                yield words


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not Linux
        return ""
