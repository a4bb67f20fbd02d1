"""`-m benchmarks collectives` measures the collectives."""

import io
import os
import re
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.__main__ import run
from benchmarks.collectives import measure_collectives, size_in_bytes
from benchmarks.harness import Bench, process_group
from mingpt.config.parser import read_config
from mingpt.program import run_program
from tests.helpers import run_ranks


def lose_rank3() -> tuple[int, str]:
    """For `run_ranks`: exit status and stderr, where rank 3 is killed in a collective."""
    if os.environ["RANK"] == "3":
        dist.broadcast = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    options = ["--bytes", "1k", "--distributed.init_method", os.environ["TEST_INIT_METHOD"]]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as stderr:
        status = run_program(run, ["collectives", *options])
    return status, stderr.getvalue()


@pytest.mark.slow
def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    status, stderr = run_ranks(4, lose_rank3, tmp_path=tmp_path, lost_rank=3)[0]
    assert status == 1
    assert re.match(r"error: rank 3 \(.*\) ", stderr)


def measure(folder: Path) -> str:
    """For `run_ranks`: what measuring 1k prints on this rank."""
    config = read_config(["--distributed.init_method", os.environ["TEST_INIT_METHOD"]])
    with process_group(config) as context, redirect_stdout(io.StringIO()) as stdout:
        measure_collectives(Bench(context, folder, pairs=1, min_run_time=0.0), [1000])
    return stdout.getvalue()


def test_the_bus_bandwidth_is_that_of_nccl_tests(tmp_path: Path) -> None:
    printed, *others = run_ranks(3, measure, tmp_path, tmp_path=tmp_path)
    assert others == ["", ""]
    assert ", 3 ranks, gloo" in printed
    rows = re.findall(r"^(\w+) +996 +(\d[\d,]*) +(\S+) +(\S+) *$", printed, re.MULTILINE)
    most = 664  # bytes: two of three parts
    sent = {"broadcast": 996, "reduce": 996, "send_recv": 996, "all_reduce": 2 * most, "ring_all_reduce": 2 * most}
    others = dict.fromkeys(["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"], most)
    assert {name: int(count.replace(",", "")) for name, count, _, _ in rows} == sent | others
    for name, count, seconds, bandwidth in rows:
        expected = int(count.replace(",", "")) / float(seconds) / 1e9
        assert float(bandwidth) == pytest.approx(expected, rel=0.02), name


def test_sizes_are_powers_of_1024() -> None:
    assert [size_in_bytes(text) for text in ("12", "1k", "2M", "3G")] == [12, 2**10, 2 * 2**20, 3 * 2**30]
