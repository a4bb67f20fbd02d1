"""One run at a time writes to a folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    ROOT,
    clean_env,
    main_process,
    run_args,
    run_captured,
    run_ranks,
    start_ranks,
    train_main,
    wait_for_step,
    wait_until,
)

from mingpt import run_lock as lock
from mingpt.errors import UserError
from mingpt.run_lock import LOCK_NAME, lock_folder

ENDLESS = {"trainer__max_steps": 1_000_000, "trainer__eval_every": 1_000_000, "trainer__save_every": 20}
HOLD_LOCK = """
import sys, time
from pathlib import Path
from mingpt.run_lock import lock_folder
lock_folder(Path(sys.argv[1]), "trainer.run_dir")
print("locked", flush=True)
time.sleep(60)
"""


def take(folder: Path) -> int:
    return lock_folder(folder, "trainer.run_dir")


def test_a_folder_is_locked_until_the_descriptor_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_TIMEOUT", 0.1)
    descriptor = take(tmp_path)
    os.close(take(tmp_path / "other"))
    message = rf"^trainer\.run_dir: process {os.getpid()} is training in {tmp_path}; wait for it, stop it, or set anoth"
    with pytest.raises(UserError, match=message):
        take(tmp_path)
    os.close(descriptor)
    os.close(take(tmp_path))


def test_a_lock_ends_with_its_process_and_excludes_other_network_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers on one host have them."""
    monkeypatch.setattr(lock, "LOCK_TIMEOUT", 0.1)
    unshare = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    command = [*unshare, sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_env(), cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="is training in"):
            take(tmp_path)
        process.kill()
        process.wait()
        os.close(take(tmp_path))


def test_the_lock_of_another_host_names_host_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That host may be lost, and its lock stay."""
    monkeypatch.setattr(lock, "LOCK_TIMEOUT", 0.1)
    descriptor = take(tmp_path)
    os.pwrite(descriptor, json.dumps({"process": 7, "host": "node7"}).encode().ljust(200), 0)
    message = f"trainer.run_dir: process 7 on node7 is training in {tmp_path} (if that host is lost, delete "
    with pytest.raises(UserError, match=rf"^{re.escape(message)}{tmp_path}/\.lock\); wait for it, stop it, or set"):
        take(tmp_path)
    (tmp_path / LOCK_NAME).unlink()
    os.close(take(tmp_path))
    os.close(descriptor)


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    messages: list[str] = []
    monkeypatch.setattr(lock.logger, "warning", messages.append)
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    os.close(take(tmp_path))
    assert messages == [
        f"{tmp_path}/{LOCK_NAME} can't be locked: Operation not supported; make sure that no other process trains there"
    ]


def test_a_snapshot_path_of_another_run_is_refused(text: Path, tmp_path: Path) -> None:
    """Its own run folder is another one."""
    descriptor = take(tmp_path / "snapshots")
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=tmp_path / "snapshots")
    [(status, _, err)] = run_ranks(1, _run_impatiently, argv, tmp_path=tmp_path)
    os.close(descriptor)
    message = f"process {os.getpid()} is training in {tmp_path}/snapshots; wait for it, stop it, or set another "
    assert (status, err) == (2, f"error: trainer.snapshot_path: {message}trainer.snapshot_path\n")


def _run_impatiently(argv: list[str]) -> tuple[int, str, str]:
    lock.LOCK_TIMEOUT = 0.1
    return run_captured(*argv)


def test_folders_are_locked_before_the_text_is_encoded(text: Path, tmp_path: Path) -> None:
    """A second start would remove the unfinished cache of the first."""
    argv = run_args(tmp_path / "run", text)
    assert run_ranks(1, _start_again_while_encoding, argv, tmp_path=tmp_path) == [(0, 2)]


def _start_again_while_encoding(argv: list[str]) -> tuple[int, int]:
    from mingpt import corpus

    lock.LOCK_TIMEOUT = 0.1
    write_tokens, statuses = corpus._write_tokens, []

    def start_another(*args: Any) -> str:
        statuses.append(run_captured(*argv)[0])
        return write_tokens(*args)

    corpus._write_tokens = start_another
    return train_main(*argv), statuses[0]


@pytest.mark.slow
def test_a_run_whose_folder_was_deleted_makes_it_again(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = run_args(run_dir, text, **ENDLESS)
    [process], _ = start_ranks(1, main_process, argv, os.devnull, os.devnull, tmp_path=tmp_path)
    wait_for_step(run_dir, 30)
    (run_dir / "snapshots").rename(tmp_path / "deleted")
    wait_until(lambda: bool(list(run_dir.glob("snapshots/step_*.pt"))), "a snapshot")
    process.terminate()
    process.join(60)
    assert process.exitcode == 143


def test_a_run_without_the_snapshots_that_it_has_saved_does_not_start_anew(text: Path, tmp_path: Path) -> None:
    """As when the disk of trainer.snapshot_path is not mounted."""
    run_dir, snapshots = tmp_path / "run", tmp_path / "disk/snapshots"
    argv = run_args(run_dir, text, trainer__snapshot_path=snapshots, trainer__max_steps=7)
    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    before = (run_dir / "metrics.jsonl").read_bytes()
    snapshots.rename(tmp_path / "not mounted")
    [(status, _, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert status == 2
    assert err == (
        f"error: trainer.snapshot_path: there is no snapshot in {snapshots}, but according to {run_dir}/metrics.jsonl "
        "this run has saved 3, the last at step 7: mount the disk, or copy the snapshots there; to start anew, set "
        "another trainer.run_dir and trainer.snapshot_path\n"
    )
    assert (run_dir / "metrics.jsonl").read_bytes() == before
