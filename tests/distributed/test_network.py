"""Two machines whose names lead nowhere: two network and host-name namespaces, joined by a wire."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, clean_env, read_rows, run_args


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two namespaces that reach each other at 10.213.0.1 and 10.213.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("makes network namespaces: needs root and iproute2")
    names = [f"{end}-{uuid.uuid4().hex[:8]}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("meeting", ["tcp://10.213.0.1:29500", "file"])
def test_machines_whose_names_lead_nowhere_find_each_other(
    meeting: str, namespaces: list[str], text: Path, tmp_path: Path
) -> None:
    knobs = {"trainer__max_steps": 2, "distributed__timeout_seconds": 20}
    where = f"file://{tmp_path}/meeting" if meeting == "file" else meeting
    processes = []
    for rank, name in enumerate(namespaces):
        if meeting == "file":  # nothing tells of the other but the default route
            subprocess.run(["ip", "-n", name, "route", "add", "default", "dev", "wire"], check=True)
        argv = run_args(tmp_path / "run", text, distributed__init_method=where, **knobs)
        host = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname machine-{name}; exec "$@"', "-"]
        command = [*host, sys.executable, str(ROOT / "main.py"), *argv]
        env = clean_env(RANK=str(rank), WORLD_SIZE="2")
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    try:
        ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [status for _, status in ends] == [0, 0], ends
    assert [row["world_size"] for row in read_rows(tmp_path / "run")] == [2, 2]
