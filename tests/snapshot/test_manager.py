"""Who writes snapshots and when, which one a run resumes from, the mirror, and what is left after the end."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mingpt.errors import UserError
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot import manager
from mingpt.snapshot.folder import SnapshotFolder
from tests.faults.runs import assert_same_run
from tests.helpers import (
    assert_equal_snapshots,
    loss_curve,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    start_ranks,
    train_main,
    train_run,
    wait_until,
    write_text,
)
from tests.inside import OVERFITTING, call_before, list_snapshots, newest_snapshot, write_overfitting_text
from trainer import Trainer

URL = "memory://mirror"
MIRROR = f"{URL}/run"


def files(path: Path | str) -> list[str]:
    return [*SnapshotFolder(str(path)).files().values()]


def names(*steps: int) -> list[str]:
    return [f"step_{step:08d}.pt" for step in steps]


def wait_for_threads(most: int = 0) -> None:
    """For `run_ranks`: waits until at most this number of threads writes or uploads a snapshot, or waits to do so."""
    wait_until(lambda: sum("snapshot" in thread.name for thread in threading.enumerate()) <= most, "the threads")


@pytest.mark.parametrize(("overhead", "cost", "pause"), [(0.5, 0.0, 1.0), (0.1, 0.03, 0.6)])
def test_saves_take_at_most_save_overhead_and_there_is_at_most_one_a_second(
    overhead: float, cost: float, pause: float, text: Path, tmp_path: Path
) -> None:
    """Already between the first two. A copy waits `cost` seconds, and a write takes as many of a processor."""
    options = {"trainer__max_steps": 10**6, "trainer__save_every": 10**6, "trainer__eval_every": 10**6}
    argv = run_args(tmp_path / "run", text, trainer__save_overhead=overhead, **options)
    [(first, second)] = run_ranks(1, _times_of_saves, argv, cost, tmp_path=tmp_path)
    assert second - first >= pause


def _times_of_saves(argv: list[str], cost: float) -> list[float]:
    times: list[float] = []

    def slow_copy(strategy: Strategy) -> None:
        times.append(time.monotonic())
        time.sleep(cost)

    def slow_write(*args: Any) -> None:
        began = time.thread_time()
        while time.thread_time() < began + cost:
            pass

    def end(trainer: Trainer) -> None:
        if len(times) == 2:
            raise UserError("the end")

    call_before(Strategy, "iter_full_state", slow_copy)
    call_before(SnapshotFolder, "write", slow_write)
    call_before(Trainer, "train_step", end)
    if cost > 0:
        manager.MIN_SECONDS = 0.1
    train_main(*argv)
    return times


def test_a_trainer_leaves_nothing_behind(text: Path, tmp_path: Path) -> None:
    """Also if a URL is the mirror."""
    run_ranks(1, _wait_for_threads_after_runs, text, tmp_path, tmp_path=tmp_path)


def _wait_for_threads_after_runs(text: Path, tmp_path: Path) -> None:
    """Waits after each run until there are no more threads than after the first one."""
    counts: list[int] = []
    for run in range(5):
        url = {} if run < 3 else {"trainer__snapshot_path": URL}
        argv = run_args(tmp_path / f"{run}", text, trainer__max_steps=1, **url)
        assert train_main(*argv) == 0
        wait_for_threads()
        counts.append(len(os.listdir("/proc/self/task")))
        wait_until(lambda: len(os.listdir("/proc/self/task")) <= counts[0], "threads of the run end")


@pytest.mark.parametrize("slow", ["write", "upload"])
def test_a_closed_trainer_starts_no_upload(slow: str, text: Path, tmp_path: Path) -> None:
    """In a session, the next one may use the same mirror. The call that is slow ends after `close`.

    While the upload of step 3 lasts, only one upload waits for it.
    """
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=URL, trainer__eval_every=100)
    [uploaded] = run_ranks(1, _uploads_of_closed_trainer, slow, argv, tmp_path=tmp_path)
    assert uploaded == ([] if slow == "write" else names(3))
    assert list_snapshots(tmp_path / "run") == (names(3) if slow == "write" else names(3, 6, 9))


def _uploads_of_closed_trainer(slow: str, argv: list[str]) -> list[str]:
    uploaded = []
    is_closed = threading.Event()

    def upload(fs: Any, path: str, remote: str) -> None:
        uploaded.append(os.path.basename(remote))
        if slow == "upload":
            is_closed.wait(60)

    def write(*args: Any) -> None:
        if slow == "write":
            is_closed.wait(60)

    def fail(trainer: Trainer) -> None:
        if trainer.progress.step == (5 if slow == "write" else 10):
            wait_for_threads(most=2)
            raise UserError("the end")

    call_before(SnapshotFolder, "write", write)
    call_before(Trainer, "train_step", fail)
    type(fsspec.filesystem("memory")).put_file = upload
    manager.EXIT_WAIT_SECONDS = 0.5
    assert train_main(*argv) == 2
    is_closed.set()
    wait_for_threads()
    return uploaded


STEPS = 60
OPTIONS = OVERFITTING | {"trainer__eval_every": 1, "trainer__max_steps": STEPS, "trainer__save_every": 10_000}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, next to its text.txt and to the folder `killed` of the same run until a kill."""
    folder = tmp_path_factory.mktemp("undisturbed")
    text = write_overfitting_text(folder / "text.txt")
    train_run(folder / "run", text, trainer__save_overhead=None, **OPTIONS)
    argv = run_args(folder / "killed", text, trainer__save_overhead=0.9, **OPTIONS)
    [process], _ = start_ranks(1, _train_until_killed, *argv, tmp_path=folder)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    return folder / "run"


def _train_until_killed(*argv: str) -> None:
    """Dies with a snapshot that is newer than the best one."""

    def die(trainer: Trainer) -> None:
        if max(trainer.snapshots.folder.files(), default=0) > max(20, trainer.progress.best.step or 0):
            os.kill(os.getpid(), signal.SIGKILL)

    call_before(Trainer, "train_step", die)
    manager.MIN_SECONDS = 0.0
    train_main(*argv)


@pytest.fixture
def killed(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the killed run."""
    return shutil.copytree(undisturbed.with_name("killed"), tmp_path / "run")


def resume(run_dir: Path, undisturbed: Path, **changes: Any) -> str:
    """Resumes the killed run, which must end like the undisturbed one. Returns stdout and stderr."""
    argv = run_args(run_dir, undisturbed.with_name("text.txt"), **OPTIONS | changes)
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=run_dir.parent)
    assert status == 0, err
    assert_same_run(undisturbed, run_dir)
    return out + err


def test_an_evaluation_that_is_the_lowest_is_saved(undisturbed: Path) -> None:
    losses = {row["step"]: row["val_loss"] for row in read_rows(undisturbed, "eval")}
    best = min(losses, key=losses.__getitem__)
    expected = {"step": best, "val_loss": losses[best]}
    assert newest_snapshot(undisturbed)["best"] == expected
    assert 1 < best < STEPS
    assert list_snapshots(undisturbed) == names(best, STEPS)


def test_a_killed_run_resumes_from_the_newest_and_leaves_what_the_rule_keeps(killed: Path, undisturbed: Path) -> None:
    """At the end, the best snapshot is named."""
    newest = files(killed / "snapshots")[-1]
    out = resume(killed, undisturbed)
    assert f"resuming from {killed}/snapshots/{newest}\n" in out
    best = newest_snapshot(undisturbed)["best"]
    assert list_snapshots(killed) == names(best["step"], STEPS)
    assert [row["step"] for row in read_rows(killed, "snapshot")] == [STEPS]
    command = f"python sample.py --snapshot {killed}/snapshots --best"
    assert f"\nbest:       validation loss {best['val_loss']:.4f} at step {best['step']}: {command}\n" in out


def test_a_run_whose_snapshots_were_never_flushed_and_are_damaged_begins_again(killed: Path, undisturbed: Path) -> None:
    damaged = files(killed / "snapshots")
    for name in damaged:
        (killed / "snapshots" / name).write_bytes(b"")
    out = resume(killed, undisturbed, trainer__save_overhead=None)  # otherwise it might write a file of the same step
    assert out.count(" is damaged (") == len(damaged)
    assert "resuming" not in out
    assert names(STEPS)[0] in list_snapshots(killed)


def test_a_lost_machine_resumes_from_the_mirror_which_the_same_rule_prunes(tmp_path: Path) -> None:
    """Each rank has a run folder. The evaluation of step 4 is the best one."""
    text = write_overfitting_text(tmp_path / "text.txt")
    options = OVERFITTING | {"trainer__keep_snapshots": 2, "trainer__save_every": 2}
    argv = run_args(tmp_path / "RANK", text, trainer__snapshot_path=URL, **options)
    first, second = run_ranks(2, _lose_rank_0, argv, tmp_path, tmp_path=tmp_path)[0]
    assert (first[0][0], first[1]) == (0, names(4, 8, 10))
    assert (second[0][0], second[1]) == (0, names(4, 12, 14))
    assert f"resuming from {URL}/rank0/step_00000010.pt" in second[0][1]
    assert list_snapshots(tmp_path / "rank0") == names(12, 14)
    assert list_snapshots(tmp_path / "rank1") == names(4, 12, 14)
    assert "--best" not in second[0][1]  # the command would not find that snapshot in rank 0's folder


def _lose_rank_0(argv: list[str], folder: Path) -> list[Any]:
    """Trains to step 10, and without the folder of rank 0 to step 14."""
    results = []
    for steps in ("10", "14"):
        results.append((_train_on_machine(*argv, "--trainer.max_steps", steps), files(f"{URL}/rank0")))
        if steps == "10" and os.environ["RANK"] == "0":
            shutil.rmtree(folder / "rank0")
    return results


def test_an_upload_holds_up_no_step_and_no_local_save_and_the_status_is_0_if_and_only_if_the_mirror_is_complete(
    text: Path, tmp_path: Path
) -> None:
    """Whatever failed before: an upload of a run that goes on, an earlier start's, or one that was cut."""
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=URL, trainer__eval_every=100)
    [(uploaded, results)] = run_ranks(1, _train_with_faulty_store, argv, tmp_path=tmp_path)
    late, failed, still_away, back, cut = results
    assert uploaded == names(3, 12)  # when the upload of step 3 ends, steps 6 and 9 are overtaken
    assert late == (0, "", names(12)[0])
    problem = f"{MIRROR}/{names(15)[0]} can't be written: the store is away"
    assert failed == still_away
    assert (failed[0], failed[2]) == (2, names(12)[0])
    assert failed[1].startswith(f"error: not all snapshots could be saved: {problem}")
    assert back == cut == (0, "", names(15)[0])
    assert list_snapshots(tmp_path / "run") == names(9, 12, 15)


def _train_with_faulty_store(argv: list[str]) -> tuple[list[str], list[tuple[int, str, str]]]:
    """Returns what the first of five starts uploads, and status, errors and the newest whole upload of each start."""
    fs = fsspec.filesystem("memory")
    put_file = type(fs).put_file
    local = Path(argv[argv.index("--trainer.run_dir") + 1]) / "snapshots"
    uploaded = []

    def fail_late(fs: Any, path: str, remote: str) -> None:
        uploaded.append(os.path.basename(remote))
        wait_until((local / names(12)[0]).exists, "the last save")
        time.sleep(0.3)
        if len(uploaded) == 1:
            raise OSError("the store is away")
        put_file(fs, path, remote)

    def fail(*args: Any) -> None:
        raise OSError("the store is away")

    def start(steps: int, put: Any) -> tuple[int, str, str]:
        type(fs).put_file = put
        status, _, err = run_captured(*argv, "--trainer.max_steps", str(steps))
        errors = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("warning: step 3: "))
        whole = [name for name in files(MIRROR) if fs.size(f"{MIRROR}/{name}") == (local / name).stat().st_size]
        return status, errors, whole[-1]

    results = [start(12, fail_late), start(15, fail), start(15, fail), start(15, put_file)]
    fs.pipe_file(f"{MIRROR}/{names(15)[0]}", (local / names(15)[0]).read_bytes()[:1000])
    return uploaded, [*results, start(15, put_file)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt, full/, a run of 12 steps, and rank0/ and rank1/, six steps on two machines."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    options = {"optimizer__decay_steps": 12}
    train_run(folder / "full", text, 2, **options)
    argv = run_args(folder / "RANK", text, trainer__max_steps=6, **options)
    assert [status for status, _, _ in run_ranks(2, _train_on_machine, *argv, tmp_path=folder)] == [0, 0]
    return folder


def _train_on_machine(*argv: str) -> tuple[int, str, str]:
    """Trains with rank0 or rank1 in place of RANK."""
    os.environ["LOCAL_RANK"] = "0"
    return run_captured(*(word.replace("RANK", f"rank{os.environ['RANK']}") for word in argv))


@pytest.mark.parametrize("fault", ["rank 0 has a damaged one", "rank 1 has none"])
def test_ranks_resume_from_the_newest_snapshot_of_any_machine(fault: str, trained: Path, tmp_path: Path) -> None:
    for name in ("rank0", "rank1"):
        assert list_snapshots(trained / name) == names(3, 6)
        shutil.copytree(trained / name, tmp_path / name)
    if fault == "rank 1 has none":
        shutil.rmtree(tmp_path / "rank1")
    else:
        for file in (tmp_path / "rank0/snapshots").glob("step_*"):
            file.write_bytes(file.read_bytes()[:-1])
    options = {"trainer__save_every": 20, "optimizer__decay_steps": 12, "distributed__strategy": "zero1"}
    argv = run_args(tmp_path / "RANK", trained / "text.txt", **options)
    (status, out, err), (other_status, other_out, _) = run_ranks(2, _train_on_machine, *argv, tmp_path=tmp_path)
    assert (status, other_status, other_out) == (0, 0, ""), err
    source = "rank0" if fault == "rank 1 has none" else "rank1"
    assert f"resuming from {tmp_path}/{source}/snapshots/step_00000006.pt" in out
    for name in ("rank0", "rank1"):
        assert_equal_snapshots(tmp_path / name, trained / "full")
    assert loss_curve(tmp_path / "rank0")[-6:] == loss_curve(trained / "full")[-6:]


def test_machines_that_share_a_folder_have_one_writer(text: Path, tmp_path: Path) -> None:
    """Rank 1 finds the id of rank 0's lock in its folder, and rank 2 another one, of an earlier run."""
    (tmp_path / "rank2").mkdir()
    (tmp_path / "rank2/.lock").write_text('{"process": 7, "host": "node7", "id": "another"}')
    argv = run_args(tmp_path / "RANK", text, trainer__max_steps=1)
    results = run_ranks(3, _train_and_list_writes, *argv, tmp_path=tmp_path)
    assert results == [(0, True), (0, False), (0, True)]
    assert list_snapshots(tmp_path / "rank0") == list_snapshots(tmp_path / "rank2") == names(1)


def _train_and_list_writes(*argv: str) -> tuple[int, bool]:
    written: list[int] = []
    call_before(SnapshotFolder, "write", lambda folder, snapshot, flush: written.append(snapshot["step"]))
    folder = {"0": "rank0", "1": "rank0", "2": "rank2"}[os.environ["RANK"]]
    os.environ["LOCAL_RANK"] = "0"
    return train_main(*(word.replace("RANK", folder) for word in argv)), bool(written)


@pytest.mark.slow
def test_machines_that_share_no_folder_each_save_between_steps_of_save_every(text: Path, tmp_path: Path) -> None:
    options = {"trainer__save_every": 1000, "trainer__max_steps": 40, "trainer__save_overhead": 0.9}
    argv = run_args(tmp_path / "RANK", text, distributed__strategy="fsdp", trainer__eval_every=1000, **options)
    assert run_ranks(2, _train_often_on_machine, 39, *argv, tmp_path=tmp_path) == [2, 2]
    steps = [[*SnapshotFolder(f"{tmp_path}/rank{rank}/snapshots").files()] for rank in (0, 1)]
    assert steps[0] == steps[1] != []
    shutil.rmtree(tmp_path / "rank0")  # that machine is lost
    assert run_ranks(2, _train_often_on_machine, None, *argv, tmp_path=tmp_path) == [0, 0]
    assert_equal_snapshots(tmp_path / "rank0", tmp_path / "rank1")
    assert min(step for step, _ in loss_curve(tmp_path / "rank0")) == steps[0][-1] + 1


def _train_often_on_machine(last_step: int | None, *argv: str) -> int:
    """Fails after the last step, if there is one."""

    def fail(trainer: Trainer) -> None:
        if trainer.progress.step == last_step:
            trainer.snapshots.newest_write.result()
            raise UserError("the end")

    call_before(Trainer, "train_step", fail)
    manager.MIN_SECONDS = 0.0
    return _train_on_machine(*argv)[0]
