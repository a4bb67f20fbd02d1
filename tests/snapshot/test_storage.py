"""SnapshotStorage: files are whole under their final name, verified, found, pruned, and loaded without running code."""

import os
import pickle
import resource
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mingpt.errors import UserError
from mingpt.snapshot.storage import DamagedSnapshotError, SnapshotStorage, load_snapshot
from tests.helpers import small_snapshot


def file_names(*steps: int) -> list[str]:
    return [f"step_{step:08d}.pt" for step in steps]


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "created/with/parents"
    storage = SnapshotStorage(str(folder), keep=3)
    storage.put_marker("as at the start of a run")
    storage.remove_marker("as at the start of a run")
    for step in (7, 12_345_678):
        written = small_snapshot(step, {"half": torch.ones(2).bfloat16()}, vocabulary="ü\n\udc80")
        storage.write(written, None)
        found = load_snapshot(storage.file(step))
        assert torch.equal(found["model"].pop("half"), written["model"].pop("half"))
        assert found == {"format": 2, **written}
    assert storage.steps() == [7, 12_345_678]
    assert sorted(os.listdir(folder)) == file_names(7, 12_345_678)


@pytest.mark.parametrize(
    "path", ["{tmp}/folder", "folder", "file:folder", "file://{tmp}/folder", "~/folder", "local:folder"]
)
def test_every_path_of_a_folder_is_written_and_read_at_the_same_place(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = SnapshotStorage(path.format(tmp=tmp_path), keep=3)
    storage.put_marker("0" * 32)
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["0" * 32 + ".mark"]
    storage.write(small_snapshot(7), None)
    assert (tmp_path / "folder/step_00000007.pt").exists()
    assert load_snapshot(storage.file(7))["step"] == 7


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A folder in fsspec's memory file system."""
    yield "memory://tests/snapshots"
    fsspec.filesystem("memory").rm("/tests", recursive=True)


def test_a_url_is_written_found_and_pruned_like_a_folder(memory_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    storage = SnapshotStorage(memory_url, keep=2)
    assert storage.load_newest() is None
    for step in (1, 2, 3, 4):
        storage.write(small_snapshot(step), 2)
    assert (load_snapshot(f"{memory_url}/step_00000002.pt")["model"]["weight"] == 2).all()
    again = SnapshotStorage(memory_url, keep=2)
    assert again.steps() == [2, 3, 4]
    assert len(fsspec.filesystem("memory").ls("/tests/snapshots")) == 3
    assert again.load_newest()["step"] == 4

    with fsspec.open(storage.file(4), "rb") as file:
        content = file.read()
    with fsspec.open(storage.file(4), "wb") as file:
        file.write(content[:-1])
    assert again.load_newest()["step"] == 3
    warnings = capsys.readouterr().err.splitlines()
    assert [warning.split()[1] for warning in warnings] == [storage.file(4), storage.file(3)]


class MakesFolder:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_snapshot_is_refused_and_does_not_run(zipped: bool, tmp_path: Path) -> None:
    folder, file = tmp_path / "made by unpickling", tmp_path / "step_00000001.pt"
    torch.save(small_snapshot(1) | {"code": MakesFolder(folder)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(DamagedSnapshotError):
        load_snapshot(str(file))
    with pytest.raises(UserError, match="damaged"):
        SnapshotStorage(str(tmp_path), keep=1).load_newest()
    assert not folder.exists()
    pickle.loads(pickle.dumps(MakesFolder(folder)))
    assert folder.exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    storage, kept = SnapshotStorage(str(tmp_path), keep=2), []
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (10, 5)):
        storage.write(small_snapshot(step), best)
        kept.append(storage.steps())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 10]]


def test_a_damaged_later_file_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    storage, damaged = SnapshotStorage(str(tmp_path), keep=1), tmp_path / "step_00000009.pt"
    storage.write(small_snapshot(3), None)
    damaged.write_bytes(b"damaged")
    assert storage.load_newest()["step"] == 3
    storage.write(small_snapshot(6), None)
    assert storage.steps() == [6, 9]
    assert storage.load_newest()["step"] == 6
    assert damaged.read_bytes() == b"damaged"
    storage.write(small_snapshot(9), None)
    assert storage.steps() == [9]
    assert storage.load_newest()["step"] == 9


def test_leftovers_of_killed_saves_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    storage = SnapshotStorage(str(tmp_path), keep=1)
    others = ["notes.txt", "other.tmp", "step_3.pt", "step_00000001.pt.copy", "thesis.mark", "step_00000001.pt.old.tmp"]
    unique = "0123456789abcdef" * 2
    leftovers = [f"step_00000004.pt.{unique}.tmp", f"step_00000099.pt.{unique}.tmp", f"{unique}.mark"]
    leftovers.append(f"frequent_00000004.pt.{unique}.tmp")
    for name in others + leftovers:
        (tmp_path / name).touch()
    assert storage.steps() == []
    for step in (5, 6):
        storage.write(small_snapshot(step), None)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "step_00000006.pt"])


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    folder = f"{tmp_path}/file/snapshots"
    storage = SnapshotStorage(folder, keep=1)
    with pytest.raises(UserError, match=rf"trainer\.snapshot_path: {folder}/step_00000001\.pt can't be written: "):
        storage.write(small_snapshot(1), None)
    with pytest.raises(UserError, match=rf"trainer\.snapshot_path: {folder} can't be read: .*directory"):
        storage.steps()
    assert (tmp_path / "file").read_text() == "content"


def test_a_newest_snapshot_that_cannot_be_read_is_not_skipped(tmp_path: Path) -> None:
    storage = SnapshotStorage(str(tmp_path), keep=3)
    storage.write(small_snapshot(1), None)
    (tmp_path / "step_00000002.pt").mkdir()
    with pytest.raises(UserError, match=r"step_00000002\.pt can't be read: .*directory.*; make it readable, or move"):
        storage.load_newest()


def test_a_failure_to_prune_is_reported_and_the_snapshot_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step_00000001.pt").mkdir()
    storage = SnapshotStorage(str(tmp_path), keep=1)
    storage.write(small_snapshot(2), None)
    assert "warning: trainer.snapshot_path: " in (err := capsys.readouterr().err)
    assert f"{tmp_path}: old snapshots can't be deleted: " in err
    assert load_snapshot(storage.file(2))["step"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1, "ema": 1}, "format is 1, must be 2; ema is unknown"),
        ({"config.model.n_kv_head": 1, "config.trainer.ema": 1}, "model.n_kv_head is unknown; trainer.ema is unknown"),
        ({"config": {"model": {}}}, "data is missing; .*; and 5 more"),
        ({"step": "6", "val_loss": "low"}, "step is '6', must be a valid integer; val_loss is 'low', must be "),
        ({"choices.threads": "auto", "best.step": 1.5}, "best.step is 1.5, .*; choices.threads is 'auto', "),
    ],
)
def test_a_snapshot_of_another_version_is_refused_in_one_message(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """What is unknown, missing or of another type is named; the snapshot before it is not used instead."""
    storage = SnapshotStorage(str(tmp_path), keep=2)
    storage.write(small_snapshot(1), None)
    content: Any = small_snapshot(2, format=2)
    for name, value in changes.items():
        *path, key = name.split(".")
        reduce(dict.__getitem__, path, content)[key] = value
    torch.save(content, storage.file(2))
    with pytest.raises(
        UserError, match=f"^{storage.file(2)} is not a snapshot that this version can read: .*{message}"
    ):
        storage.load_newest()


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Files of this process can't grow beyond 100 kB, in place of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported_and_existing_snapshots_stay(file_size_limit: None, tmp_path: Path) -> None:
    storage = SnapshotStorage(str(tmp_path), keep=1)
    storage.write(small_snapshot(2), None)
    message = r"step_00000003\.pt can't be written: \[Errno 27\] File too large; make room"
    with pytest.raises(UserError, match=message):
        storage.write(small_snapshot(3, {"large": torch.zeros(100_000)}), None)
    assert os.listdir(tmp_path) == file_names(2)
    assert storage.load_newest()["step"] == 2
    storage.write(small_snapshot(4), None)
    assert os.listdir(tmp_path) == file_names(4)
