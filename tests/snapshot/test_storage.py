"""SnapshotStorage: files are whole under their final name, verified, found, pruned, and loaded without running code."""

import os
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mingpt.errors import UserError
from mingpt.snapshot.storage import DamagedSnapshotError, PruneError, SnapshotStorage, load_snapshot


def small_snapshot(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"weight": torch.full((3, 4), float(step))}, "val_loss": None}


def file_names(*steps: int) -> list[str]:
    return [f"step_{step:08d}.pt" for step in steps]


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "created/with/parents"
    storage = SnapshotStorage(str(folder), keep=3)
    for step in (7, 12_345_678):
        extra = {"text": "ü\n", "none": None, "half": torch.ones(2).bfloat16()}
        assert storage.write(small_snapshot(step) | extra, None) == str(folder / f"step_{step:08d}.pt")
        found = load_snapshot(storage.file(step))
        assert torch.equal(found["model"]["weight"], small_snapshot(step)["model"]["weight"])
        assert torch.equal(found["half"], torch.ones(2).bfloat16())
        assert (found["step"], found["text"], found["none"]) == (step, "ü\n", None)
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
    shown = storage.write(small_snapshot(7), None)
    assert os.path.samefile(shown, tmp_path / "folder/step_00000007.pt")
    assert load_snapshot(shown)["step"] == 7
    assert storage.load_newest(print)["step"] == 7


class FolderSpy:
    """Lists a folder while it is itself being pickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        self.names = sorted(os.listdir(self.folder))
        return str, ()


def test_the_final_name_appears_only_when_the_file_is_whole(tmp_path: Path) -> None:
    storage, spy = SnapshotStorage(str(tmp_path), keep=1), FolderSpy(tmp_path)
    storage.write(small_snapshot(1), None)
    storage.write(small_snapshot(2) | {"spy": spy}, None)
    assert spy.names[0] == "step_00000001.pt"
    assert [name.endswith(".tmp") for name in spy.names] == [False, True]
    assert os.listdir(tmp_path) == file_names(2)


def test_a_loaded_snapshot_and_its_file_do_not_change_each_other(tmp_path: Path) -> None:
    storage = SnapshotStorage(str(tmp_path), keep=3)
    storage.write({"step": 6, "weight": torch.ones(100_000)}, None)
    loaded = load_snapshot(storage.file(6))
    storage.write({"step": 6, "weight": torch.full((100_000,), 2.0)}, None)  # replaces the mapped file
    assert (loaded["weight"] == 1).all()
    load_snapshot(storage.file(6))["weight"].zero_()
    assert (load_snapshot(storage.file(6))["weight"] == 2).all()


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A folder in fsspec's memory file system."""
    yield "memory://tests/snapshots"
    fsspec.filesystem("memory").rm("/tests", recursive=True)


def test_a_url_is_written_found_and_pruned_like_a_folder(memory_url: str) -> None:
    storage = SnapshotStorage(memory_url, keep=2)
    assert storage.load_newest(print) is None
    assert storage.write(small_snapshot(1), None) == f"{memory_url}/step_00000001.pt"
    for step in (2, 3, 4):
        storage.write(small_snapshot(step), 2)
    assert (load_snapshot(f"{memory_url}/step_00000002.pt")["model"]["weight"] == 2).all()
    again = SnapshotStorage(memory_url, keep=2)
    assert again.steps() == [2, 3, 4]
    assert len(fsspec.filesystem("memory").ls("/tests/snapshots")) == 3
    assert again.load_newest(print)["step"] == 4

    with fsspec.open(storage.file(4), "rb") as file:
        content = file.read()
    with fsspec.open(storage.file(4), "wb") as file:
        file.write(content[:-1])
    messages: list[str] = []
    assert again.load_newest(messages.append)["step"] == 3
    assert [message.split()[0] for message in messages] == [storage.file(4), storage.file(3)]


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
        SnapshotStorage(str(tmp_path), keep=1).load_newest(print)
    assert not folder.exists()
    pickle.loads(pickle.dumps(MakesFolder(folder)))
    assert folder.exists()


def test_a_snapshot_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its archive is followed by a trailer of 40 bytes."""
    file = Path(SnapshotStorage(str(tmp_path), keep=1).write(small_snapshot(1), None))
    file.write_bytes(file.read_bytes() + b"GPTsnap2" + bytes(32))
    assert load_snapshot(str(file))["step"] == 1
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(DamagedSnapshotError, match="cut short"):
        load_snapshot(str(file))


@pytest.mark.parametrize(("architecture", "approximate"), [("gpt2", "tanh"), ("gpt2", None), (None, None)])
def test_a_model_with_an_activation_that_exists_no_longer_is_refused(
    architecture: str | None, approximate: str | None, tmp_path: Path
) -> None:
    """Before these keys were in snapshots, models were GPT-2's, with tanh."""
    storage, sections = SnapshotStorage(str(tmp_path), keep=3), []
    for model in (
        {"architecture": "gpt2", "gelu_approximate": "none"},
        {"architecture": "nanochat"},
        {"architecture": architecture, "gelu_approximate": approximate},
    ):
        sections.append({key: value for key, value in model.items() if value is not None})
        storage.write(small_snapshot(len(sections)) | {"format": 1, "config": {"model": sections[-1]}}, None)
    for step in (1, 2):
        found = load_snapshot(storage.file(step))["config"]["model"]
        assert found == {"architecture": sections[step - 1]["architecture"], "conv_kernel_size": None}
    message = r"step_00000003\.pt was trained with model\.gelu_approximate tanh, which this program does not have: take"
    with pytest.raises(UserError, match=message):
        storage.load_newest(print)


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
    assert storage.load_newest(print)["step"] == 3
    storage.write(small_snapshot(6), None)
    assert storage.steps() == [6, 9]
    assert storage.load_newest(print)["step"] == 6
    assert damaged.read_bytes() == b"damaged"
    storage.write(small_snapshot(9), None)
    assert storage.steps() == [9]
    assert storage.load_newest(print)["step"] == 9


def test_leftovers_of_killed_saves_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    storage = SnapshotStorage(str(tmp_path), keep=1)
    others = ["notes.txt", "other.tmp", "step_3.pt", "step_00000001.pt.copy", "thesis.mark", "step_00000001.pt.old.tmp"]
    unique = "0123456789abcdef" * 2
    leftovers = [f"step_00000004.pt.{unique}.tmp", f"step_00000099.pt.{unique}.tmp", f"{unique}.mark"]
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
        storage.load_newest(print)


def test_a_rank_that_the_others_have_left_out_deletes_no_snapshot(tmp_path: Path) -> None:
    """It was stopped while they went on, and does not know which snapshots they keep."""
    for step in (1, 2, 3):
        SnapshotStorage(str(tmp_path), keep=1, is_member=lambda: False).write(small_snapshot(step), None)
    assert sorted(os.listdir(tmp_path)) == file_names(1, 2, 3)
    SnapshotStorage(str(tmp_path), keep=1).write(small_snapshot(4), None)
    assert sorted(os.listdir(tmp_path)) == file_names(4)


def test_a_failure_to_prune_is_reported_and_the_snapshot_is_whole(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt").mkdir()
    storage = SnapshotStorage(str(tmp_path), keep=1)
    with pytest.raises(PruneError, match=r"step_00000002\.pt is whole, but older ones can't be deleted and stay: "):
        storage.write(small_snapshot(2), None)
    assert load_snapshot(storage.file(2))["step"] == 2


def test_another_format_is_refused(tmp_path: Path) -> None:
    storage = SnapshotStorage(str(tmp_path), keep=1)
    storage.write(small_snapshot(1) | {"format": 99}, None)
    message = r"step_00000001\.pt has format 99, this program reads 2: take the program that"
    with pytest.raises(UserError, match=message):
        storage.load_newest(print)


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
        storage.write(small_snapshot(3) | {"large": torch.zeros(100_000)}, None)
    assert os.listdir(tmp_path) == file_names(2)
    assert storage.load_newest(print)["step"] == 2
    storage.write(small_snapshot(4), None)
    assert os.listdir(tmp_path) == file_names(4)
