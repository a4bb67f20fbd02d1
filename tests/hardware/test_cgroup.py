"""Limits of memory and CPU time from trees of files such as the kernel's, and from cgroups of this machine."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from helpers import clean_env

from mingpt.hardware.cgroup import cpu_limit, memory_limit

GIB = 2**30
NO_LIMIT = 9223372036854771712  # as version 1 writes it
V2 = "30 23 0:26 {place} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 32 0:30 {place} /sys/fs/cgroup/cpu,cpuacct rw shared:11 - cgroup cgroup rw,cpu,cpuacct\n" + (
    "35 32 0:32 {place} /sys/fs/cgroup/memory rw shared:15 - cgroup cgroup rw,memory\n"
)
OTHER = "24 1 0:22 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("mounts", "groups", "limits", "memory", "cores"),
    [
        # A SLURM step: the job's limit is above the step's.
        (
            V2.format(place="/"),
            "0::/slurm/job_7/step_0/task_0\n",
            {"slurm/job_7/memory.max": f"{4 * GIB}\n", "slurm/job_7/step_0/memory.max": "max\n"},
            4 * GIB,
            None,
        ),
        # A service of systemd: the lowest counts, wherever it is.
        (
            V2.format(place="/"),
            "0::/user.slice/run-1.scope\n",
            {
                "user.slice/memory.max": f"{8 * GIB}\n",
                "user.slice/run-1.scope/memory.max": f"{2 * GIB}\n",
                "user.slice/cpu.max": "150000 100000\n",
                "user.slice/run-1.scope/cpu.max": "max 100000\n",
            },
            2 * GIB,
            1.5,
        ),
        # A container with a namespace of its own: its cgroup is the root that it sees.
        (V2.format(place="/"), "0::/\n", {"memory.max": f"{GIB}\n", "cpu.max": "400000 100000\n"}, GIB, 4.0),
        # A container without one: the mount begins at its cgroup, and the path is the host's.
        (V2.format(place="/docker/c0ffee"), "0::/docker/c0ffee\n", {"memory.max": f"{GIB}\n"}, GIB, None),
        (V2.format(place="/docker/c0ffee"), "0::/docker/c0ffee/inner\n", {"inner/memory.max": f"{GIB}\n"}, GIB, None),
        # A process that was moved out of the namespace's root
        (V2.format(place="/"), "0::/../other\n", {"memory.max": f"{GIB}\n"}, GIB, None),
        # Version 1, where each controller has a hierarchy
        (
            V1.format(place="/"),
            "9:memory:/job\n4:cpu,cpuacct:/job/step\n1:name=systemd:/\n",
            {
                "memory/memory.limit_in_bytes": f"{NO_LIMIT}\n",
                "memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
                "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/job/step/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/job/step/cpu.cfs_period_us": "100000\n",
            },
            3 * GIB,
            0.5,
        ),
        (
            V1.format(place="/docker/c0ffee"),
            "9:memory:/docker/c0ffee\n4:cpu,cpuacct:/docker/c0ffee\n",
            {"memory/memory.limit_in_bytes": f"{GIB}\n"},
            GIB,
            None,
        ),
        # Both versions at once; no limit; files that hold something else; nothing
        (
            V1.format(place="/") + V2.format(place="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
            "9:memory:/job\n0::/job\n",
            {"memory/job/memory.limit_in_bytes": f"{GIB}\n", "unified/job/memory.max": f"{2 * GIB}\n"},
            GIB,
            None,
        ),
        (V2.format(place="/"), "0::/a b/c:d\n", {"a b/c:d/memory.max": f"{GIB}\n"}, GIB, None),
        (V2.format(place="/"), "0::/job\n", {"job/memory.max": "max\n", "job/cpu.max": "max 100000\n"}, None, None),
        (V2.format(place="/"), "0::/job\n", {"job/memory.max": "?\n", "job/cpu.max": "\n"}, None, None),
        ("", "0::/job\n", {}, None, None),
    ],
)
def test_the_lowest_limit_of_the_cgroup_and_those_above_it_counts(
    mounts: str, groups: str, limits: dict[str, str], memory: int | None, cores: float | None, tmp_path: Path
) -> None:
    files = {f"sys/fs/cgroup/{name}": content for name, content in limits.items()}
    root = write_tree(tmp_path, {"proc/self/mountinfo": OTHER + mounts, "proc/self/cgroup": groups, **files})
    assert memory_limit(root) == memory
    assert cpu_limit(root) == cores


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cpu_limit(tmp_path) is None


REPORT = """
import torch
from mingpt.hardware.cgroup import cpu_limit
from mingpt.hardware.device import memory_per_rank
from mingpt.hardware.threads import choose_threads
print(cpu_limit(), *choose_threads("auto", 1, None), memory_per_rank(torch.device("cpu"), 1, 1))
"""


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/cpu", os.W_OK), reason="makes cgroups of version 1: needs root")
def test_limits_of_a_real_cgroup_hold_for_memory_and_threads() -> None:
    name = f"mingpt-test-{uuid.uuid4().hex}"
    memory, cpu = Path("/sys/fs/cgroup/memory", name), Path("/sys/fs/cgroup/cpu", name)
    folders = [memory, memory / "inner", cpu, cpu / "inner"]
    try:
        for folder in folders:
            folder.mkdir()
        (memory / "memory.limit_in_bytes").write_text(str(2 * GIB))
        (cpu / "cpu.cfs_quota_us").write_text("100000")
        join = "".join(f"echo $$ > {folder}/inner/cgroup.procs; " for folder in (memory, cpu))
        command = ["sh", "-c", f'{join} exec "$@"', "-", sys.executable, "-c", REPORT]
        done = subprocess.run(command, capture_output=True, text=True, env=clean_env(), timeout=120, check=False)
    finally:
        for folder in reversed(folders):
            if folder.exists():
                folder.rmdir()
    assert done.stdout == f"1.0 1 auto: a CPU quota of 1 cores / 1 ranks {2 * GIB}\n", done.stderr
