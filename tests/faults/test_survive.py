"""distributed.survive: the loss of a rank ends no run, and loses no finished step."""

import json
import re
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE, ROOT, in_namespace, ip, newest_snapshot, run_args, write_overfitting_text

from tests.faults.runs import Run, assert_same_run, train_undisturbed

# Place of a rank in a view, the signal that it gets there, and how many ranks the view must have. First those that two
# ranks can reach.
PLACES = [
    ("collective", 1, "SIGKILL", 2),
    ("saving", 0, "SIGKILL later", 2),
]
ALL_PLACES = [
    *PLACES,
    ("evaluating", 0, "SIGKILL", 2),
    ("forward", 1, "SIGKILL", 3),
    ("gathered", 1, "SIGKILL", 3),
    ("decided", 2, "SIGKILL", 3),
    ("written", 0, "SIGKILL", 3),
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
OPTIONS: dict[str, Any] = {
    "distributed__reduction": "tree",
    "optimizer__name": "muon",
    "optimizer__decay_steps": 3000,
    "trainer__eval_every": 20,
    "trainer__save_every": 10,
    "trainer__batch_size": 9,
}


def surviving_run(run_dir: Path, text: Path, program: Path = ROOT / "main.py", **options: Any) -> Run:
    """A run that ends by a signal only."""
    endless = {"distributed__survive": True, "trainer__max_steps": 10**6}
    return Run(run_dir, run_args(run_dir, text, **OPTIONS, **endless, **options), program)


def assert_same_as_undisturbed(run_dir: Path, text: Path) -> None:
    step = newest_snapshot(run_dir)["step"]
    undisturbed = train_undisturbed(run_dir.with_name("undisturbed"), text, trainer__max_steps=step, **OPTIONS)
    assert_same_run(undisturbed, run_dir)


def run_with_orders(
    orders: list[Any],
    ranks: int,
    text: Path,
    tmp_path: Path,
    env: Mapping[str, str | None] | None = None,
    **options: Any,
) -> Run:
    """Runs kill_at.py until all orders are carried out, with these changes of the environment."""
    folder = tmp_path / "orders"
    folder.mkdir()
    with surviving_run(tmp_path / "run", text, ROOT / "tests/faults/kill_at.py", **options) as run:
        run.env |= {"KILL_AT": json.dumps(orders), "KILL_AT_FOLDER": str(folder), **(env or {})}
        run.start_by_hand(ranks)
        run.finish(timeout=300)  # of the 22 places on two busy cores
    assert "stopped by SIGTERM" in run.output()
    done = sorted((int(number), place) for file in folder.iterdir() for number, place in [file.name.split("_")])
    assert done == list(enumerate(place for place, *_ in orders))
    return run


@pytest.mark.parametrize(
    ("places", "ranks"),
    [(PLACES, 2), pytest.param(ALL_PLACES, 3, marks=pytest.mark.slow)],
    ids=["two places", "all places"],
)
def test_a_rank_that_is_lost_anywhere_loses_no_step(places: list[Any], ranks: int, text: Path, tmp_path: Path) -> None:
    run = run_with_orders(places, ranks, text, tmp_path)
    assert_same_as_undisturbed(run.run_dir, text)
    assert [row["step"] for row in run.rows("start")] == [0]
    # The successor of a rank that was killed while it saved does so at the next step, no multiple of save_every.
    saved = [row["step"] for row in run.rows("snapshot")]
    assert [step for step in saved[:-1] if step % OPTIONS["trainer__save_every"]], saved


END_OF_VIEW = """
import sys

import main
from mingpt.program import exit_process, run_program
from mingpt.survive.membership import MembershipChanged
from trainer import Trainer

finish = Trainer.finish

def finish_and_forget(trainer):
    status = finish(trainer)
    if trainer.context.rank > 0:
        raise MembershipChanged
    return status

Trainer.finish = finish_and_forget
exit_process(run_program(main.main, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_whose_view_is_over_before_it_knows_the_end_of_the_run_has_the_same_status(
    text: Path, tmp_path: Path
) -> None:
    """As when another process is lost during the last collective, which only rank 0 completes."""
    script = tmp_path / "script.py"
    script.write_text(END_OF_VIEW)
    with surviving_run(tmp_path / "run", text, script) as run:
        run.start_by_hand(2)
        run.wait_for_step(2)
        run.processes[1].terminate()
        assert run.finish() == [143, 143]


LOST_AT_THE_END = """
import os
import signal
import sys
import time

import main
from mingpt.program import exit_process, run_program
from trainer import Trainer

train_step = Trainer.train_step

def hang_or_end(trainer):
    if trainer.progress.step == 11 and os.environ["RANK"] == "1":
        time.sleep(1000)
    if trainer.progress.step == 11 and os.environ["RANK"] == "2" and trainer.context.world_size == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(trainer)

Trainer.train_step = hang_or_end
exit_process(run_program(main.main, sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_run_ends_with_status_0_without_ranks_that_hang_and_that_start_again(tmp_path: Path) -> None:
    """In the last step, which patience decides, rank 1 hangs; without it, rank 2 is killed."""
    text, script = write_overfitting_text(tmp_path / "text.txt"), tmp_path / "script.py"
    script.write_text(LOST_AT_THE_END)
    survive = {"distributed__survive": True, "distributed__reduction": "tree", "distributed__timeout_seconds": 6}
    options = PATIENCE | survive
    with Run(tmp_path / "run", run_args(tmp_path / "run", text, **options), script) as run:
        run.start_by_hand(3)
        assert run.finish() == [0, 0, 0], run.output()
    views = [[member[0] for member in row["members"]] for row in run.rows("view")]
    assert views == [["0", "1", "2"], ["0", "2"], ["0"]]
    assert run.step() == 12
    assert "rank 2: its process was ended by SIGKILL: starting another" in run.output()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_others_continue(text: Path, tmp_path: Path) -> None:
    orders = [("forward", 1, "hang", 3)]
    run = run_with_orders(orders, 3, text, tmp_path, distributed__timeout_seconds=4)
    late = r"rank 1 \(\d@.*:\d+\) has not [a-z ]+ collective \d+ \(\w+\)"
    where = r"rank 1: tests/faults/kill_at\.py:\d+ for [34]\.\d seconds"
    [view] = [row for row in run.rows("view") if "collective" in row["reason"]]
    assert re.fullmatch(rf"{late}; (.*; )?{where}(; .*)?", view["reason"])
    assert len(view["members"]) == 2


@pytest.mark.slow
def test_a_machine_that_is_cut_off_is_left_out_and_joins_again(
    namespaces: list[str], text: Path, tmp_path: Path
) -> None:
    """Two processes on the machine with the store, one on the other."""
    here, elsewhere = (f"host-{name}" for name in namespaces)

    def hosts() -> Counter[str]:
        """Members of the newest view on each machine."""
        views = run.rows("view")
        return Counter(re.split("[@:]", member)[1] for member in views[-1]["members"]) if views else Counter()

    with surviving_run(tmp_path / "run", text, distributed__init_method="tcp://10.213.0.1:29500") as run:
        run.start_by_hand(3, [in_namespace(namespaces[rank // 2]) for rank in range(3)])
        run.wait_for_step(20)
        ip("-n", namespaces[1], "link", "set", "eth1", "down")
        run.wait(lambda: hosts() == {here: 2}, "a view without the other machine")
        run.wait_for_step(run.step() + 20)
        ip("-n", namespaces[1], "link", "set", "eth1", "up")
        run.wait(lambda: hosts() == {here: 2, elsewhere: 1}, "a view with the other machine")
        run.wait_for_step(run.step() + 20)
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.finish() == [143] * 3, run.output()
    assert_same_as_undisturbed(run.run_dir, text)
