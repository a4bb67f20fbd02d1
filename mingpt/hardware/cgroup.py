"""Limits that containers, SLURM and systemd set: those of this process's cgroup and of all above it, in Linux.

Both versions of cgroups are read, also side by side: "man 7 cgroups", and the kernel's admin-guide/cgroup-v2.rst.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the lowest limit of memory in bytes; None if there is none.

    Args:
        root: of the file system
    """
    limits = []
    for folder in _folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [number for number in _numbers(folder / name) if number > 0]
    return min(limits, default=None)


def cpu_limit(root: Path = ROOT) -> float | None:
    """Returns the lowest quota of CPU time in cores, such as 1.5; None if there is none."""
    limits = []
    for folder in _folders("cpu", root):
        # Microseconds of CPU time in each period, and the period; -1 or "max": no limit
        times = _numbers(folder / "cpu.max")
        times = times or _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        if len(times) == 2 and min(times) > 0:
            quota, period = times
            limits.append(quota / period)
    return min(limits, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of this process's cgroups with a controller, each followed by those above it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for place, mount in _mounts(controller if controllers else None, root):
            # A container's own hierarchy begins at the place that is mounted, and may be all that it sees.
            inside = PurePosixPath(path)
            folder = mount / inside.relative_to(place) if inside.is_relative_to(place) else mount
            yield folder
            while folder != mount:
                folder = folder.parent
                yield folder


def _mounts(controller: str | None, root: Path) -> Iterator[tuple[str, Path]]:
    """Yields the place in the hierarchy that is mounted, and where; a controller of None means version 2."""
    for line in _lines(root / "proc/self/mountinfo"):
        # id, parent, device, place, mount point, options, any number of fields, "-", type, source, options
        before, _, after = line.partition(" - ")
        place, mount = before.split()[3:5]
        kind, _, options = after.split()
        if kind == ("cgroup2" if controller is None else "cgroup") and (controller or "rw") in options.split(","):
            yield place, root / mount.lstrip("/")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # another system than Linux
        return []


def _numbers(file: Path) -> list[int]:
    """The numbers in a file; none if it is not there, or says "max"."""
    words = " ".join(_lines(file)).split()
    try:
        return [int(word) for word in words]
    except ValueError:
        return []
