"""One run at a time writes to a folder."""

import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mingpt import start
from mingpt.config.parser import read_config
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import RankInfo
from mingpt.errors import UserError
from mingpt.system import run_lock as lock
from mingpt.system.run_lock import LOCK_NAME, RunLock
from tests.faults.runs import Run
from tests.helpers import clean_env, read_rows, run_args, run_captured, run_ranks
from tests.inside import call_before
from trainer import Trainer

HOLD_LOCK = """
import sys, time
from pathlib import Path
from mingpt.system.run_lock import RunLock
RunLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_TIMEOUT", 0.1)


def take(folder: Path) -> int:
    return RunLock(folder).descriptor


def assert_locked(folder: Path, process: str = "") -> None:
    with pytest.raises(UserError, match=f"^trainer.run_dir: .*{re.escape(process)} is training in {folder}; wait for"):
        take(folder)


def test_a_folder_is_locked_until_the_descriptor_is_closed(tmp_path: Path) -> None:
    descriptor = take(tmp_path)
    os.close(take(tmp_path / "other"))
    message = (
        f"trainer.run_dir: process {os.getpid()} on {platform.node()} is training in {tmp_path}; wait for it, stop it "
        "(a Trainer in a notebook by its `close()`), or set another trainer.run_dir; if it is lost, delete "
        f"{tmp_path}/.lock"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        take(tmp_path)
    os.close(descriptor)
    os.close(take(tmp_path))


def test_a_lock_ends_with_its_process_and_excludes_other_network_namespaces(tmp_path: Path) -> None:
    """Containers on one host have such namespaces."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    command = [*unshare, sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_env()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        assert_locked(tmp_path, f"process {process.pid} on {platform.node()}")
        process.kill()
        process.wait()
        os.close(take(tmp_path))


def test_the_lock_of_another_host_names_host_and_file(tmp_path: Path) -> None:
    """The other host may be lost while its lock remains."""
    descriptor = take(tmp_path)
    os.pwrite(descriptor, json.dumps({"process": 7, "host": "node7"}).encode().ljust(200), 0)
    assert_locked(tmp_path, "process 7 on node7")
    (tmp_path / LOCK_NAME).unlink()
    os.close(take(tmp_path))
    os.close(descriptor)


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock.fcntl, "flock", Mock(side_effect=OSError(95, "Operation not supported")))
    os.close(take(tmp_path))
    assert caplog.messages == [
        f"{tmp_path}/{LOCK_NAME} can't be locked: Operation not supported; make sure that no other process trains there"
    ]


@pytest.mark.usefixtures("text")
def test_a_second_start_is_refused_while_the_first_reads_its_text(tmp_path: Path, monkeypatch: Any) -> None:
    refused: list[None] = []
    call_before(
        start, "write_run_tokens", lambda *_: refused.append(assert_locked(tmp_path / "run")), monkeypatch.setattr
    )
    build_trainer(tmp_path).close()
    assert len(refused) == 1


def build_trainer(folder: Path, **changes: Any) -> Trainer:
    config = read_config(run_args(folder / "run", folder / "text.txt", trainer__max_steps=1, **changes))
    return Trainer(config, DistributedContext(RankInfo(), config.distributed))


@pytest.mark.usefixtures("text")
def test_a_trainer_has_the_folders_until_its_end_or_close(tmp_path: Path) -> None:
    """A notebook keeps references to trainers and errors."""
    folder = tmp_path / "run"
    gc.collect()  # closes files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match="can't be read") as kept:
        build_trainer(tmp_path, data__path=tmp_path / "missing")
    trained = build_trainer(tmp_path)
    assert trained.train() == 0
    done = build_trainer(tmp_path)
    assert done.train() == 0
    by_hand = build_trainer(tmp_path)
    assert_locked(folder)
    by_hand.close()
    os.close(take(folder))
    assert len(os.listdir("/proc/self/fd")) == before + 3 * 2  # each Trainer maps two files of tokens
    assert (kept, trained.progress.step, done.resumed_from) == (kept, 1, f"{folder}/snapshots/step_00000001.pt")


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_run_whose_folder_vanishes_ends_with_one_message(how: str, text: Path, tmp_path: Path) -> None:
    """The run does not create the folder again, and does not change the folder of another run.

    The folder is deleted in step 5, or replaced in the last save.
    """
    run_dir = tmp_path / "run"
    argv = run_args(run_dir, text, trainer__sample_every=1)
    (tmp_path / "other/snapshots").mkdir(parents=True)
    for name in (".lock", "metrics.jsonl", "snapshots/.lock", "snapshots/frequent_00000004.pt"):
        (tmp_path / "other" / name).write_text("another run's")
    for step in (1, 2, 3):
        (tmp_path / f"other/snapshots/step_{step:08d}.pt").write_text("another run's")
    outputs = run_ranks(2, _lose_while_training, argv, run_dir, how, tmp_path=tmp_path)
    message = (
        f"error: {run_dir}, the folder of this run, was deleted, moved or replaced, so the run ends without saving; if "
        "it was moved, move it back and run the same command to resume\n"
    )
    assert [(status, err) for status, _, err in outputs] == [(2, message), (2, "")]
    assert "done in" not in outputs[0][1]
    if how == "replaced":
        assert read_files(run_dir) == read_files(tmp_path / "other")
    else:
        assert not run_dir.is_dir()


def _lose_while_training(argv: list[str], run_dir: Path, how: str) -> tuple[int, str, str]:
    def delete(trainer: Trainer) -> None:
        if trainer.progress.step == 4 and trainer.context.rank == 0:
            trainer.snapshots.newest_write.result()
            shutil.rmtree(run_dir)

    def replace(content: dict[str, Any], file: Any) -> None:
        if content["step"] == 12:
            run_dir.rename(run_dir.with_name("old"))
            shutil.copytree(run_dir.with_name("other"), run_dir)

    if how == "deleted":
        call_before(Trainer, "train_step", delete)
    else:
        call_before(torch, "save", replace)
    return run_captured(*argv)


@pytest.mark.slow
def test_torchrun_begins_a_new_run_after_the_folder_was_moved(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = run_args(run_dir, text, trainer__max_steps=1_000_000)
    with Run(run_dir, argv) as run:
        run.start_torchrun(2, "--max_restarts=1")
        run.wait_for_step(5)
        run_dir.rename(tmp_path / "moved")
        run.wait_for_step(5)
        run.processes[0].terminate()
        run.finish()
    assert [row["step"] for row in read_rows(run_dir, "start")] == [0]
    assert {row["restart_count"] for row in read_rows(run_dir)} == {1}
