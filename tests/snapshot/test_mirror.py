"""The mirror keeps good copies: nothing damaged and nothing of another run replaces them."""

import os
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.helpers import (
    OVERFITTING,
    call_before,
    run_args,
    run_captured,
    run_each_captured,
    run_ranks,
    wait_until,
    write_overfitting_text,
)
from trainer import Trainer

URL = "memory://mirror"
MIRROR = f"{URL}/run"


def contents() -> dict[str, bytes]:
    """The files of the mirror."""
    fs = fsspec.filesystem("memory")
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.ls(MIRROR, detail=False)}


@pytest.mark.parametrize("step", [4, 8])
def test_a_damaged_local_snapshot_is_named_and_does_not_replace_the_mirrors(step: int, tmp_path: Path) -> None:
    """The best one, of step 4, and the newest one. It is not uploaded to a mirror that lacks it, either."""
    text = write_overfitting_text(tmp_path / "text.txt")
    options = OVERFITTING | {"trainer__max_steps": 8, "trainer__keep_snapshots": 1, "trainer__save_every": 4}
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=URL, **options)
    file = tmp_path / f"run/snapshots/step_{step:08d}.pt"
    [(before, second, after, third, lacking)] = run_ranks(1, _start_with_damage, argv, file, tmp_path=tmp_path)
    assert before.keys() == {"step_00000004.pt", "step_00000008.pt"}
    assert after == before
    assert lacking == {name: content for name, content in before.items() if name != file.name}
    for status, _, err in (second, third):
        assert status == 0
        assert f"{file} is damaged (" in err


def _start_with_damage(argv: list[str], file: Path) -> tuple[Any, ...]:
    assert run_captured(*argv)[0] == 0
    before = contents()
    file.write_bytes(file.read_bytes()[:-1000])
    second = run_captured(*argv)
    after = contents()
    if file.name == "step_00000008.pt":  # without it, the run would repeat its steps and save it again
        return before, second, after, second, {name: before[name] for name in before if name != file.name}
    fsspec.filesystem("memory").rm_file(f"{MIRROR}/{file.name}")
    return before, second, after, run_captured(*argv), contents()


def test_runs_of_different_names_have_different_mirrors(text: Path, tmp_path: Path) -> None:
    options = {"trainer__eval_every": 100, "trainer__snapshot_path": URL}
    argvs = [run_args(tmp_path / name, text, **options) for name in ("run", "other")]
    argvs.append(run_args(tmp_path / "lost machine/run", text, **options))
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert [(status, err) for status, _, err in results] == [(0, "")] * 3
    assert "resuming" not in results[1][1]
    assert "already trained" in results[2][1]


def test_a_run_that_is_stopped_while_the_store_is_down_is_saved(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=URL)
    [(status, out, err)] = run_ranks(1, _stop_without_store, argv, tmp_path=tmp_path)
    assert status == 143
    assert "stopped by SIGTERM at step 5 after saving a snapshot; run the same command to resume\n" in out
    assert (f"warning: not all snapshots could be saved: {MIRROR}/step_0000000") in err


def _stop_without_store(argv: list[str]) -> tuple[int, str, str]:
    def stop(trainer: Trainer) -> None:
        if trainer.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: trainer.signals.signal != 0, "the signal")

    def fail(*args: Any) -> None:
        raise OSError("the store is away")

    call_before(Trainer, "train_step", stop)
    type(fsspec.filesystem("memory")).put_file = fail
    return run_captured(*argv)
