"""The mirror keeps good copies: nothing damaged and nothing of another run replaces them."""

import os
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.helpers import (
    OVERFITTING,
    list_snapshots,
    run_args,
    run_captured,
    run_ranks,
    wait_until,
    write_overfitting_text,
)
from trainer import Trainer

MIRROR = "memory://mirror/snapshots"


def contents() -> dict[str, bytes]:
    """The files of the mirror."""
    fs = fsspec.filesystem("memory")
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.ls(MIRROR, detail=False)}


@pytest.mark.parametrize("step", [4, 8])
def test_a_damaged_local_snapshot_is_named_and_does_not_replace_the_mirrors(step: int, tmp_path: Path) -> None:
    """The best one, of step 4, and the newest one. It is not uploaded to a mirror that lacks it, either."""
    text = write_overfitting_text(tmp_path / "text.txt")
    options = OVERFITTING | {"trainer__max_steps": 8, "trainer__keep_snapshots": 1, "trainer__save_every": 4}
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=MIRROR, **options)
    file = tmp_path / f"run/snapshots/step_{step:08d}.pt"
    [(before, second, after, third, lacking)] = run_ranks(1, _start_with_damage, argv, file, tmp_path=tmp_path)
    assert before.keys() == {"run_id", "step_00000004.pt", "step_00000008.pt"}
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


def test_a_mirror_belongs_to_one_run(text: Path, tmp_path: Path) -> None:
    """Another run is refused at its start. If the mirror was empty then, its uploads fail, and it says so."""
    options = {"trainer__eval_every": 100, "trainer__snapshot_path": MIRROR}
    one, other, third = (run_args(tmp_path / name, text, **options) for name in ("one", "other", "third"))
    [(before, after, starts)] = run_ranks(1, _start_two_runs, one, other, third, tmp_path=tmp_path)
    late, resumed, new, lost, moved = starts
    refusal = f"trainer.snapshot_path: set another URL, since {MIRROR} has the snapshots of another run"
    assert late[0] == 2
    assert f"is in {tmp_path}/other/snapshots, but not all snapshots could be uploaded: {refusal}" in late[2]
    assert (resumed[0], resumed[2]) == (2, f"error: {refusal}\n")
    assert (new[0], new[2]) == (
        2,
        f"error: {refusal}, {tmp_path}/one; to continue that one here, set trainer.run_dir to a folder of this name\n",
    )
    assert after == before
    for status, out, err in (lost, moved):
        assert (status, err) == (0, "")
        assert "already trained" in out


def _start_two_runs(one: list[str], other: list[str], third: list[str]) -> tuple[Any, ...]:
    """The first run is lost later, or moved. The other run begins before the first one uploads, the third one after."""
    fs = fsspec.filesystem("memory")
    step = Trainer.train_step

    def upload(trainer: Trainer) -> Any:
        for name, content in before.items():
            fs.pipe_file(f"{MIRROR}/{name}", content)
        return step(trainer)

    assert run_captured(*one)[0] == 0
    before = contents()
    fs.rm(MIRROR, recursive=True)
    Trainer.train_step = upload  # type: ignore[method-assign]
    late = run_captured(*other)
    Trainer.train_step = step  # type: ignore[method-assign]
    resumed, new = run_captured(*other), run_captured(*third)
    after = contents()
    run_dir = Path(one[one.index("--trainer.run_dir") + 1])
    run_dir.rename(run_dir.with_name("moved"))
    lost = run_captured(*one)
    moved = run_captured(*one, "--trainer.run_dir", str(run_dir.with_name("moved")))
    return before, after, (late, resumed, new, lost, moved)


def test_a_run_that_is_stopped_while_the_store_is_down_is_saved(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=MIRROR)
    [(status, out, err)] = run_ranks(1, _stop_without_store, argv, tmp_path=tmp_path)
    assert status == 143
    assert "stopped by SIGTERM at step 5 after saving a snapshot; run the same command to continue\n" in out
    assert (
        f"warning: the snapshot of step 5 is in {tmp_path}/run/snapshots, but not all snapshots could be uploaded: "
        f"trainer.snapshot_path: {MIRROR}/run_id can't be written: the store is away"
    ) in err
    assert "Run the same command to upload them" in err


def _stop_without_store(argv: list[str]) -> tuple[int, str, str]:
    step = Trainer.train_step

    def stop(trainer: Trainer) -> Any:
        if trainer.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: trainer.signals.signal != 0, "the signal")
        return step(trainer)

    def fail(*args: Any) -> None:
        raise OSError("the store is away")

    Trainer.train_step = stop  # type: ignore[method-assign]
    type(fsspec.filesystem("memory")).pipe_file = fail
    return run_captured(*argv)


def test_a_folder_that_can_not_be_listed_ends_no_run(text: Path, tmp_path: Path) -> None:
    """The files are written; only the deletion of old ones has to wait."""
    argv = run_args(tmp_path / "run", text)
    [(status, out, err)] = run_ranks(1, _train_without_listings, argv, tmp_path=tmp_path)
    assert status == 0
    assert "best: " not in out
    assert err == (
        f"warning: {tmp_path}/run/snapshots can't be read: a stale handle; make it readable, or name another folder\n"
    )
    assert list_snapshots(tmp_path / "run")[-1] == "step_00000012.pt"


def _train_without_listings(argv: list[str]) -> tuple[int, str, str]:
    step = Trainer.train_step

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("a stale handle")

    def train_step(trainer: Trainer) -> Any:
        LocalFileSystem.ls = fail
        return step(trainer)

    Trainer.train_step = train_step  # type: ignore[method-assign]
    return run_captured(*argv)


def test_a_mirror_of_an_earlier_version_gets_the_id_of_its_run(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=MIRROR)
    [(statuses, before, after)] = run_ranks(1, _start_without_id, argv, tmp_path=tmp_path)
    assert statuses == [0, 0]
    assert before["run_id"] == after["run_id"]


def _start_without_id(argv: list[str]) -> tuple[Any, ...]:
    statuses = [run_captured(*argv)[0]]
    before = contents()
    fsspec.filesystem("memory").rm_file(f"{MIRROR}/run_id")
    return [*statuses, run_captured(*argv)[0]], before, contents()
