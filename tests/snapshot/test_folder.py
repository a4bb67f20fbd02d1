"""SnapshotFolder: files are whole under their final name, verified, found, listed, pruned; no code in them runs."""

import os
import pickle
import re
import resource
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic.dataclasses import dataclass

from mingpt.config.schema import STRICT, GPTConfig
from mingpt.errors import UserError
from mingpt.snapshot import folder as folder_module
from mingpt.snapshot.__main__ import run as list_path
from mingpt.snapshot.folder import DamagedSnapshotError, SnapshotFolder, expired_steps, fingerprint, load_snapshot, sync
from mingpt.snapshot.format import gpt_config
from tests.inside import small_snapshot


def file_names(*steps: int) -> list[str]:
    return [f"step_{step:08d}.pt" for step in steps]


@pytest.fixture
def folder(tmp_path: Path) -> SnapshotFolder:
    return SnapshotFolder(str(tmp_path))


def write(folder: SnapshotFolder, step: int, best: int | None = None, **weights: Any) -> None:
    folder.write(small_snapshot(step, weights or None, best={"step": best, "val_loss": 0.1}), flush=True)


def load_newest(folder: SnapshotFolder) -> dict[str, Any]:
    newest = folder.load_newest()
    assert newest is not None
    return newest


def test_the_newest_the_newest_scheduled_and_the_best_are_kept(folder: SnapshotFolder) -> None:
    kept: list[list[int]] = []
    steps: list[int] = []
    for step in range(1, 18):
        steps = [*steps, step]
        expired = expired_steps(steps, save_every=4, best=6 if step >= 6 else None, keep=2)
        steps = [each for each in steps if each not in expired]
        kept.append(steps)
    assert kept[:5] == [[1], [2], [3], [4], [4, 5]]
    assert kept[6:8] == [[4, 6, 7], [4, 6, 8]]
    assert kept[11:13] == [[6, 8, 12], [6, 8, 12, 13]]
    assert kept[15:] == [[6, 12, 16], [6, 12, 16, 17]]

    folder.save_every = 2
    for step in (1, 2, 3, 4, 5):
        write(folder, step, best=1)
    assert [*folder.files()] == [1, 4, 5]
    write(folder, 6, best=1)
    assert [*folder.files()] == [1, 6]


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = SnapshotFolder(f"{tmp_path}/created/with/\u00fc #?", keep=3)
    folder.make()
    for step in (7, 12_345_678):
        written = small_snapshot(step, {"half": torch.ones(2).bfloat16()}, vocabulary="ü\n\udc80")
        folder.write(written, flush=step == 7)
        found = load_snapshot(folder.file(step))
        assert torch.equal(found["model"].pop("half"), written["model"].pop("half"))
        assert found == written
    assert folder.files() == dict(zip((7, 12_345_678), file_names(7, 12_345_678), strict=True))
    assert sorted(os.listdir(folder.path)) == file_names(7, 12_345_678)


def test_what_expires_while_an_upload_lasts_is_not_uploaded(
    folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one of step 1 is uploaded first, and takes as long as the saves of steps 3 and 4."""
    remote = SnapshotFolder("memory://tests/mirror")
    put_file = remote.fs.put_file
    uploaded = []

    def save_and_put_file(path: str, copy: str) -> None:
        uploaded.append(os.path.basename(copy))
        if len(uploaded) == 1:
            for step in (3, 4):
                write(folder, step, best=1)
        put_file(path, copy)

    write(folder, 1, best=1)
    write(folder, 2, best=1)
    remote.fs.pipe_file(f"{remote.root}/{file_names(0)[0]}", b"expired")
    monkeypatch.setattr(type(remote.fs), "put_file", staticmethod(save_and_put_file))
    sync(folder, remote, 2, 1)
    assert [*remote.files()] == [1]
    sync(folder, remote, 4, 1)
    assert [*remote.files()] == [1, 4]
    remote.fs.rm("/tests", recursive=True)


def test_a_reader_takes_the_successor_of_a_snapshot_that_was_just_deleted(
    folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is training deletes each snapshot that the reader has just found, three times."""
    load = load_snapshot

    def replace_and_load(path: str) -> dict[str, Any]:
        if (step := max(folder.files())) < 4:
            write(folder, step + 1)
        return load(path)

    write(folder, 1)
    monkeypatch.setattr(folder_module, "load_snapshot", replace_and_load)
    assert load_newest(SnapshotFolder(folder.path))["step"] == 4
    assert capsys.readouterr().err == ""


class MakesFolder(str):
    """Unpickling it makes a folder with its name."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self),)


@pytest.mark.parametrize(
    ("zipped", "error", "message"),
    [
        (True, UserError, r"(?s)1\.pt is not damaged, but torch.load refuses it: .*GLOBAL posix.mkdir"),
        (False, DamagedSnapshotError, r"not a file of torch\.save"),
    ],
)
def test_code_in_a_snapshot_is_refused_and_does_not_run(
    zipped: bool, error: type, message: str, folder: SnapshotFolder, tmp_path: Path
) -> None:
    code = MakesFolder(tmp_path / "made by unpickling")
    torch.save(small_snapshot(1) | {"code": code}, folder.file(1), _use_new_zipfile_serialization=zipped)
    with pytest.raises(error, match=message):
        load_snapshot(folder.file(1))
    assert not Path(code).exists()
    pickle.loads(pickle.dumps(code))
    assert Path(code).exists()


def test_leftovers_of_killed_saves_are_removed_by_the_next_start_and_other_files_are_not(
    folder: SnapshotFolder, tmp_path: Path
) -> None:
    others = ["notes.txt", "other.tmp", "step_3.pt", "step_00000001.pt.copy", "step_00000001.pt.old.tmp"]
    for name in (*others, f"step_00000004.pt.{'0123456789abcdef' * 2}.tmp"):
        (tmp_path / name).touch()
    assert folder.files() == {}
    for step in (4, 5, 6):
        write(SnapshotFolder(folder.path, keep=9), step)  # killed before it has deleted the others
    folder.make()
    write(folder, 6)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, *file_names(6)])


def test_a_newest_snapshot_that_cannot_be_read_is_not_skipped(folder: SnapshotFolder, tmp_path: Path) -> None:
    write(folder, 1)
    (tmp_path / "step_00000002.pt").mkdir()
    with pytest.raises(UserError, match=r"2\.pt can't be read: .*Is a directory.*; make it readable, or move "):
        folder.load_newest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, " that this version can read: its format is 2, must be 3; weights of other programs must be "),
        ({"config.model.n_kv_head": 1}, r" of this code: config.model: (?s:.)*\nn_kv_head\n  Unexpected keyword"),
    ],
)
def test_a_snapshot_of_another_version_is_refused_in_one_message(
    changes: dict[str, Any], message: str, folder: SnapshotFolder
) -> None:
    """The snapshot before it is not used instead."""
    write(folder, 1)
    content: Any = small_snapshot(2)
    for name, value in changes.items():
        *path, key = name.split(".")
        reduce(dict.__getitem__, path, content)[key] = value
    torch.save(content, folder.file(2))
    with pytest.raises(UserError, match=f"^{folder.file(2)} is not a snapshot{message}"):
        folder.load_newest()


def test_a_full_disk_is_reported_and_existing_snapshots_stay(folder: SnapshotFolder) -> None:
    """In its place, files can't grow beyond 100 kB."""
    write(folder, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"3\.pt can't be written: \[Errno 27\] File too large; free disk space"):
            write(folder, 3, large=torch.zeros(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(folder.path) == file_names(2)
    assert load_newest(folder)["step"] == 2
    write(folder, 5)
    assert os.listdir(folder.path) == file_names(5)


# python -m mingpt.snapshot


def write_run(path: Path, change: float = 0.0) -> Path:
    """Writes snapshots of steps 3 and 6, with a validation loss at step 6. Returns their folder."""
    folder = SnapshotFolder(f"{path}/snapshots", keep=2)
    folder.make()
    for step, val_loss in ((3, None), (6, 2.34567)):
        weight = torch.full((3, 4), step + change)
        state = {"optimizer": {"weight": {"exp_avg": -weight}}, "val_loss": val_loss}
        folder.write(small_snapshot(step, {"weight": weight}, **state), flush=True)
    return path / "snapshots"


def list_rows(path: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    list_path([str(path)])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_fingerprints_are_equal_for_equal_bits_and_differ_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, change in (("run", 0.0), ("again", 0.0), ("other", 0.1)):
        write_run(tmp_path / name, change)
    paths = ("run", "again", "run/snapshots", "run/snapshots/step_00000003.pt", "other")
    expected, *same, one, other = ([row[-2:] for row in list_rows(tmp_path / path, capsys)[1:]] for path in paths)
    assert same == [expected, expected]
    assert one == expected[:1]
    assert len({cell for row in expected + other for cell in row}) == 8

    tensors = {"a": torch.tensor([0.0, 1.0]), "b": {"c": torch.tensor(2.0)}}
    others = torch.tensor([-0.0, 1.0]), torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, 1.0]).double()
    changed = [tensors | {"a": other} for other in others]
    changed += [tensors | {"b": {"c": torch.tensor(3.0)}}, {"a": tensors["a"], "B": tensors["b"]}]
    assert fingerprint(dict(reversed(tensors.items()))) == fingerprint(tensors)
    assert len({fingerprint(tensors), *map(fingerprint, changed)}) == 6


def test_a_run_folder_is_listed_with_validation_losses_and_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path)
    header, first, last = list_rows(tmp_path, capsys)
    assert header == ["step", "val_loss", "state", "weights", "optimizer"]
    assert first[:2] == ["3", "whole"]  # no evaluation at step 3
    assert last[:3] == ["6", "2.3457", "whole"]
    file = folder / "step_00000003.pt"
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((3, 4), 3.0).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    (folder / "step_00000006.pt").write_bytes(content[:500])
    assert list_path([str(folder)]) == 1
    flipped, cut = [" ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert re.fullmatch(r"DAMAGED: the bytes of its part archive/data/\d+ do not match their CRC-32", flipped)
    assert cut == "DAMAGED: cut short, or not a file of torch.save: File is not a zip file"


def test_a_missing_snapshot_is_reported(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=rf"^PATH: no snapshot at {folder}; main\.py saves them in its run folder"):
            list_path([str(folder)])


def test_a_key_of_the_model_may_be_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots have lists in place of tuples."""

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class WithWindows(GPTConfig):
        windows: tuple[int, ...] = (4, 8)

    monkeypatch.setattr("mingpt.snapshot.format.GPTConfig", WithWindows)
    snapshot = small_snapshot(1)
    snapshot["config"]["model"]["windows"] = [16, 32]
    assert gpt_config(snapshot).windows == (16, 32)  # type: ignore[attr-defined]
