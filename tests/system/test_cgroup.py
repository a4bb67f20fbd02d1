"""Limits of memory and CPU time from file trees like the kernel's."""

from pathlib import Path

import pytest

from mingpt.system import cgroup

GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "limits", "memory", "cores"),
    [
        # A SLURM step: the job's limit is above the step's.
        (
            "0::/slurm/job_7/step_0/task_0\n",
            {"slurm/job_7/memory.max": f"{4 * GIB}\n", "slurm/job_7/step_0/memory.max": "max\n"},
            4 * GIB,
            None,
        ),
        # A service of systemd: the lowest counts, wherever it is.
        (
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
        # A container with a cgroup namespace, which makes its cgroup the root
        ("0::/\n", {"memory.max": f"{GIB}\n", "cpu.max": "400000 100000\n"}, GIB, 4.0),
        # A container without a namespace: the mount begins at its cgroup, and the path is the host's.
        ("0::/docker/c0ffee\n", {"memory.max": f"{GIB}\n"}, GIB, None),
        # No limit; cgroups of version 1
        ("0::/job\n", {"job/memory.max": "max\n", "job/cpu.max": "max 100000\n"}, None, None),
        ("9:memory:/job\n1:name=systemd:/\n", {}, None, None),
    ],
)
def test_the_lowest_limit_of_the_cgroup_and_those_above_it_counts(
    groups: str, limits: dict[str, str], memory: int | None, cores: float | None, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    assert cgroup.memory_limit() is None  # without cgroups
    files = {f"sys/fs/cgroup/{name}": content for name, content in limits.items()}
    for name, content in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cgroup.memory_limit() == memory
    assert cgroup.cpu_limit() == cores
