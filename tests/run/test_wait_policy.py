"""Threads while other programs use the cores."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from mingpt.monitoring.logging import logger
from mingpt.run import wait_policy
from mingpt.run.wait_policy import passive_wait_policy, runqueue_seconds
from mingpt.system import threads
from mingpt.system.threads import available_cores, busy_cores

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


def test_a_moments_work_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores 0 and 1 may be used, core 2 may not."""
    monkeypatch.setattr(threads, "available_cores", lambda: {0, 1})
    for first, second, expected in (
        ([0.0, 30.0, 100.0], None, 0),
        ([100.0, 0.0, 100.0], [10.0, 0.0, 0.0], 0),
        ([100.0, 30.0, 0.0], [60.0, 20.0, 100.0], 1),
        ([100.0, 100.0, 0.0], [100.0, 90.0, 100.0], 2),
    ):
        answers = {0.03: first, 0.5: second}
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu, answers=answers: answers[interval])
        assert busy_cores() == expected


def test_waiting_for_a_core_is_told_from_sleeping() -> None:
    """This process shares a core with a busy one, so it waits while it computes, and does not while it sleeps."""
    cores = os.sched_getaffinity(0)
    with busy_program() as program:
        waited = []
        try:
            for process in (0, program.pid):
                os.sched_setaffinity(process, {min(cores)})
            for work in (compute, time.sleep):
                before = runqueue_seconds()
                work(0.5)
                after = runqueue_seconds()
                waited.append(sum(after[task] - before[task] for task in after.keys() & before.keys()))
        finally:
            os.sched_setaffinity(0, cores)
    assert waited[0] > 0.1
    assert waited[1] < waited[0] / 2


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


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


SPINS = 0.7  # threads that wait for a core while a program is busy
SLEEPS = 0.5
IDLE = 0.02
WARNING = "training is slow, since other programs use the CPU cores that it runs on"
ADVICE = "; a new run with fewer trainer.threads may be faster"


@pytest.mark.parametrize(
    ("busy", "torch_threads", "ranks", "local_rank", "passive", "warnings"),
    [
        (set(), 2, 1, 0, [], []),
        ({5}, 2, 1, 0, [6], []),  # for a moment, for example during a save
        (set(range(60)), 2, 1, 0, [1, 32], [31]),
        (set(range(700)), 2, 1, 0, list(range(1, 714, 31)), [31, 651]),
        (set(range(60)), 1, 1, 0, [], [10]),  # a single thread does not wait for others
        (set(range(60)), 2, 1, 1, [1, 32], []),  # another rank of this machine warns
        (set(range(60)), 2, 2, 0, [1, 32], []),  # ranks with more threads than cores
    ],
)
def test_policy_and_warning_follow_the_time_that_threads_wait(
    busy: set[int],
    torch_threads: int,
    ranks: int,
    local_rank: int,
    passive: list[int],
    warnings: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`busy` are the seconds when another program is busy; the expected values are seconds, too."""
    second = 0
    waited = {"1": 0.0}
    began: list[int] = []
    warned: list[int] = []
    is_passive = False

    class Clock:
        def is_set(self) -> bool:
            return second > 713

        def wait(self, timeout: float) -> None:
            nonlocal second
            for _ in range(round(timeout)):
                contended = SLEEPS if is_passive else SPINS
                waited["1"] += contended if second in busy else IDLE
                second += 1

    @contextmanager
    def record() -> Iterator[None]:
        nonlocal is_passive
        began.append(second)
        is_passive = True
        yield
        is_passive = False

    def warn(message: str) -> None:
        assert message == WARNING + (ADVICE if torch_threads > 1 else "")
        warned.append(second)

    monkeypatch.setattr(wait_policy, "runqueue_seconds", waited.copy)
    monkeypatch.setattr(wait_policy, "passive_wait_policy", record)
    monkeypatch.setattr(wait_policy, "available_cores", lambda: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    monkeypatch.setattr(time, "monotonic", lambda: float(second))
    monkeypatch.setattr(logger, "warning", warn)
    context: Any = SimpleNamespace(local_rank=local_rank, local_world_size=ranks)
    wait_policy._watch(Clock(), context)  # type: ignore[arg-type]
    assert (began, warned) == (passive, warnings)
