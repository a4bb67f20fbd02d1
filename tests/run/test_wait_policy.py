"""Threads while other programs use the cores."""

import io
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mingpt.run import wait_policy
from mingpt.run.wait_policy import adaptive_wait_policy, passive_wait_policy, runqueue_seconds
from mingpt.system.threads import available_cores, busy_cores
from tests.helpers import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


@contextmanager
def busy_program() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_cores_that_another_program_uses_are_counted() -> None:
    with busy_program():
        assert 1 <= busy_cores() <= len(available_cores())


@pytest.mark.usefixtures("two_threads")
def test_threads_sleep_between_regions_while_the_policy_is_passive() -> None:
    matrix = torch.ones(64 * 32768)

    def sleeps() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        for _ in range(100):
            matrix.add_(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

    tasks = len(runqueue_seconds())
    sleeps()  # starts the threads
    for _ in range(2):
        active = min(sleeps() for _ in range(3))  # where other programs take a core, threads sleep now and then
        with passive_wait_policy():
            assert torch.get_num_threads() == 2
            passive = sleeps()
        assert passive > max(100, 2 * active)
    assert min(sleeps() for _ in range(3)) < passive / 2
    assert len(runqueue_seconds()) <= tasks + 1  # no team is left


@pytest.mark.parametrize(("threads", "advice"), [(1, ""), (2, "; a new run with fewer trainer.threads may be faster")])
def test_beside_busy_programs_threads_sleep_and_a_warning_says_so(threads: int, advice: str, tmp_path: Path) -> None:
    if len(available_cores()) < threads:
        pytest.skip(f"needs {threads} cores")
    [(teams, err)] = run_ranks(1, _compute_beside_busy_programs, threads, tmp_path=tmp_path)
    assert (threads + 1 in teams) == (threads > 1)  # a single thread does not wait for others
    assert err == f"warning: training is slow, because other programs use its CPU cores{advice}\n"


def _compute_beside_busy_programs(threads: int) -> tuple[list[int], str]:
    """For `run_ranks`: returns the sizes of teams that make threads sleep, and stderr."""
    for name, value in {"CHECK_SECONDS": 0.5, "PASSIVE_SECONDS": 0.5, "WARN_AFTER_SECONDS": 1.0}.items():
        setattr(wait_policy, name, value)
    cores = sorted(available_cores())[:threads]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    matrix = torch.ones(64 * 32768)
    context: Any = SimpleNamespace(local_rank=0, local_world_size=1)
    with (
        ExitStack() as programs,
        mock.patch.object(wait_policy, "_make_team", wraps=wait_policy._make_team) as make_team,
        redirect_stderr(io.StringIO()) as err,
    ):
        for core in cores:
            os.sched_setaffinity(programs.enter_context(busy_program()).pid, {core})
        with adaptive_wait_policy(context):
            end = time.monotonic() + 4
            while time.monotonic() < end:
                matrix.add_(1)
    return [call.args[0] for call in make_team.call_args_list], err.getvalue()
