"""distributed.survive: the loss of a rank ends no run, and loses no finished step."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    ROOT,
    TORCHRUN,
    assert_equal_snapshots,
    clean_env,
    free_port,
    in_namespace,
    ip,
    newest_snapshot,
    read_rows,
    run_program,
    wait_for_step,
    wait_until,
    write_text,
)

from tests.faults.survive import Plan, curves, options, undisturbed_run

PLACES = [  # of a rank in a view, the signal that it gets there, and how many ranks the view must have
    ("forward", 1, "SIGKILL", 3),
    ("collective", 1, "SIGKILL", 2),
    ("gathered", 1, "SIGKILL", 3),
    ("decided", 2, "SIGKILL", 3),
    ("written", 0, "SIGKILL", 3),
    ("saving", 0, "SIGKILL later", 2),
    ("evaluating", 0, "SIGKILL", 2),
]
MORE_PLACES = [
    ("writing", 0, "SIGSTOP", 3),
    ("in collective", 1, "SIGKILL", 3),
    ("left", 0, "SIGKILL", 3),
    ("committed", 1, "SIGKILL", 3),
    ("saving", 0, "SIGSTOP", 2),
    ("logged", 0, "SIGKILL", 3),
    ("ready", 1, "SIGKILL", 3),
    ("copying", None, "SIGKILL", 1),
    ("copied", None, "SIGKILL", 1),
    ("forward", 2, "SIGKILL", 3),
    ("formed", 1, "SIGKILL", 3),
    ("gathered", 1, "SIGSTOP", 3),
    ("saving", 0, "SIGKILL", 2),
    ("saved", 0, "SIGKILL", 2),
    ("written", 0, "SIGSTOP", 3),
]


@pytest.mark.parametrize(
    "places", [PLACES, pytest.param(MORE_PLACES, marks=pytest.mark.slow)], ids=["places", "more places"]
)
def test_a_rank_that_is_lost_anywhere_loses_no_step(places: list[Any], tmp_path: Path) -> None:
    plan, text = Plan("muon", "fp32", 3, 10), write_text(tmp_path / "text.txt")
    folder = tmp_path / "orders"
    folder.mkdir()
    argv = options(plan, tmp_path / "run", text, 10**6, distributed__survive=True)
    orders = {"KILL_AT": json.dumps(places), "KILL_AT_FOLDER": str(folder)}
    run = run_program(*TORCHRUN, "--nproc_per_node=3", str(ROOT / "tests/faults/kill_at.py"), *argv, **orders)
    assert "stopped by SIGTERM" in run.stdout, run.stderr
    done = sorted((int(number), place) for file in folder.iterdir() for number, place in [file.name.split("_")])
    assert done == list(enumerate(place for place, *_ in places))
    undisturbed = undisturbed_run(plan, tmp_path, text, newest_snapshot(tmp_path / "run")["step"])
    assert_equal_snapshots(undisturbed, tmp_path / "run")
    assert curves(undisturbed) == curves(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "start"] == [0]
    if places is PLACES:  # its successor saves at the next step, which is no multiple of save_every
        saved = [row["step"] for row in rows if row["event"] == "snapshot"]
        assert [step for step in saved[:-1] if step % plan.save_every], saved


END_OF_VIEW = """
import time

import main
from mingpt.survive.context import SurvivingContext
from mingpt.survive.membership import MembershipChanged

exchange_messages = SurvivingContext.exchange_messages

def wait_for_rank0(context, *args):
    if context.rank > 0:
        context.membership.is_over.wait()
        raise MembershipChanged
    return exchange_messages(context, *args)

SurvivingContext.exchange_messages = wait_for_rank0
main.main()
"""


def test_a_rank_whose_view_is_over_before_it_knows_the_end_of_the_run_has_the_same_status(tmp_path: Path) -> None:
    """Rank 0, which has told how the run has ended, is gone before rank 1 looks."""
    script = tmp_path / "script.py"
    script.write_text(END_OF_VIEW)
    plan, text, run_dir = Plan("adamw", "fp32", 2, 50), write_text(tmp_path / "text.txt"), tmp_path / "run"
    init_method = f"tcp://127.0.0.1:{free_port()}"
    argv = options(plan, run_dir, text, 10**6, distributed__survive=True, distributed__init_method=init_method)
    processes = []
    for rank in range(2):
        env = clean_env(RANK=str(rank), WORLD_SIZE="2", PYTHONPATH=str(ROOT))
        processes.append(subprocess.Popen([sys.executable, str(script), *argv], env=env))
    try:
        wait_for_step(run_dir, 2)
        processes[1].terminate()
        statuses = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert statuses == [143, 143]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_others_continue(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    folder.mkdir()
    argv = options(Plan("adamw", "fp32", 3, 10), tmp_path / "run", write_text(tmp_path / "text.txt"), 10**6)
    argv += ["--distributed.survive", "true", "--distributed.timeout_seconds", "4"]
    orders = {"KILL_AT": json.dumps([("forward", 1, "hang", 3)]), "KILL_AT_FOLDER": str(folder)}
    run = run_program(*TORCHRUN, "--nproc_per_node=3", str(ROOT / "tests/faults/kill_at.py"), *argv, **orders)
    assert "stopped by SIGTERM" in run.stdout, run.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    [view] = [row for row in rows if row["event"] == "view" and "not come" in row["reason"]]
    late = r"rank 1 \(\d@.*:\d+\) has not come to collective \d+ \(\w+\)"
    where = r"rank 1: tests/faults/kill_at\.py:\d+ for [34]\.\d seconds"
    assert re.fullmatch(rf"{late}; (.*; )?{where}(; .*)?", view["reason"])
    assert len(view["members"]) == 2


@pytest.mark.slow
def test_a_machine_that_is_cut_off_is_left_out_and_joins_again(namespaces: list[str], tmp_path: Path) -> None:
    """Two processes on the machine with the store, one on the other."""
    plan, text, run_dir = Plan("adamw", "fp32", 3, 50), write_text(tmp_path / "text.txt"), tmp_path / "run"
    init_method = "tcp://10.213.0.1:29500"
    argv = options(plan, run_dir, text, 10**6, distributed__survive=True, distributed__init_method=init_method)
    processes = []
    for rank in range(3):
        command = [*in_namespace(namespaces[rank // 2]), sys.executable, str(ROOT / "main.py"), *argv]
        env = clean_env(RANK=str(rank), WORLD_SIZE="3")
        with (tmp_path / f"log-{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))

    def hosts() -> Counter[str]:
        """Members of the newest view on each machine."""
        file = run_dir / "metrics.jsonl"
        views = read_rows(run_dir, "view") if file.exists() else []
        return Counter(re.split("[@:]", member)[1] for member in views[-1]["members"]) if views else Counter()

    here, elsewhere = (f"host-{name}" for name in namespaces)
    try:
        wait_for_step(run_dir, 20)
        ip("-n", namespaces[1], "link", "set", "eth1", "down")
        wait_until(lambda: hosts() == {here: 2}, "a view without the other machine")
        wait_for_step(run_dir, read_rows(run_dir)[-1]["step"] + 20)
        ip("-n", namespaces[1], "link", "set", "eth1", "up")
        wait_until(lambda: hosts() == {here: 2, elsewhere: 1}, "a view with the other machine")
        wait_for_step(run_dir, read_rows(run_dir)[-1]["step"] + 20)
        processes[0].terminate()
        statuses = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for rank in range(3):  # shown by pytest if the test fails
            print((tmp_path / f"log-{rank}").read_text())
        print(*read_rows(run_dir, "view"), sep="\n")
    assert statuses == [143] * 3
    undisturbed = undisturbed_run(plan, tmp_path, text, newest_snapshot(run_dir)["step"])
    assert_equal_snapshots(undisturbed, run_dir)
    assert curves(undisturbed) == curves(run_dir)
