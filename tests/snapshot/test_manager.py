"""Who writes snapshots, which one a run resumes from, and writing in the background."""

import os
import reprlib
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mingpt.config.schema import SHAPE_KEYS, Config, config_to_dict
from mingpt.errors import UserError
from mingpt.snapshot.format import KEPT_KEYS, check_header, split_header
from mingpt.snapshot.load import fit_config
from mingpt.snapshot.manager import SnapshotManager, elect_writer_ranks
from mingpt.snapshot.storage import SnapshotStorage, load_snapshot
from mingpt.snapshot.writer import AsyncSnapshotWriter
from mingpt.system.run_lock import RunLock
from tests.helpers import (
    assert_equal_snapshots,
    list_snapshots,
    loss_curve,
    newest_snapshot,
    open_process_group,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    small_snapshot,
    train_main,
    write_text,
)


class BlockingStorage(SnapshotStorage):
    """Waits for permission before it writes."""

    def __init__(self, path: str) -> None:
        super().__init__(path, keep=3)
        self.permission = threading.Event()

    def write(self, snapshot: dict[str, Any], best_step: int | None) -> None:
        assert self.permission.wait(20)
        super().write(snapshot, best_step)


def test_the_writer_saves_the_state_of_the_step_and_reuses_its_buffers(tmp_path: Path) -> None:
    storage = BlockingStorage(str(tmp_path))
    frequent = SnapshotStorage(str(tmp_path), keep=2, is_frequent=True)
    writer, weight, addresses = AsyncSnapshotWriter(frequent, RunLock({})), torch.ones(1000), set()
    for step in (1, 2):
        header = split_header(small_snapshot(step))
        writer.save(header, [("weight", weight, {})], storage)
        weight += 1  # the next step
        assert not writer.is_idle.wait(0.05)
        assert not writer.results
        storage.permission.set()
        assert writer.is_idle.wait(20)
        storage.permission.clear()
        assert torch.equal(load_snapshot(storage.file(step))["model"]["weight"], torch.full((1000,), float(step)))
        assert writer.results.popleft() == (False, step, None, None, header["best"], storage.file(step))
        assert not writer.results
        addresses |= {buffer.data_ptr() for buffer in writer.staging_buffers.values()}
    assert len(addresses) == 1


def test_a_snapshot_that_no_start_could_load_is_refused_before_it_is_written() -> None:
    """For example, if the code has changed what is saved, but not what is read."""
    header = split_header(small_snapshot(3))
    check_header(header, "FILE")
    changed = header | {"vocabulary": ["words"], "words": 1}
    message = (
        r"^FILE, not yet written, is not a snapshot that this version can read: vocabulary is \['words'\], .*; words"
    )
    with pytest.raises(UserError, match=rf"{message} is unknown; change Snapshot in .*format.py, too$"):
        check_header(changed, "FILE")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", [("copy", True), ("synchronize", torch.device("cuda:0")), ("write", 1)]),
        ("mps:0", [("copy", False), ("synchronize", torch.device("mps:0")), ("write", 1)]),
        ("cpu", [("copy", False), ("write", 1)]),  # where a GPU is not used, it is not initialized
    ],
)
def test_copies_are_complete_before_they_are_written(
    device: str, expected: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to pageable memory block; on MPS all staging buffers are pageable."""
    events: list[tuple] = []
    storage = SnapshotStorage(str(tmp_path), keep=1)
    writer = AsyncSnapshotWriter(storage, RunLock({}))
    write = lambda item: events.append(("write", item[0]["step"]))  # noqa: E731
    writer.queue = SimpleNamespace(put=write)  # type: ignore[assignment]
    copy = lambda copies, tensors, non_blocking: events.append(("copy", non_blocking))  # noqa: E731
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda of: events.append(("synchronize", of)))
    with FakeTensorMode():
        weight, moment = torch.ones(3, device=device), torch.ones(3, device=device)
        writer.save({"step": 1}, [("weight", weight, {"moment": moment})], storage)
    assert events == expected


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_save_that_would_wait_too_long_is_skipped_and_the_last_is_made(
    strategy: str, text: Path, tmp_path: Path
) -> None:
    options = {"distributed__timeout_seconds": 2, "trainer__save_every": 5, "distributed__strategy": strategy}
    argv = run_args(tmp_path / "run", text, **options)
    (status, _, err), _ = run_ranks(2, _train_with_slow_write_of_step_5, *argv, tmp_path=tmp_path)
    assert status == 0
    assert "warning: step 10: trainer.snapshot_path: the previous snapshot is still being written" in err
    assert newest_snapshot(tmp_path / "run")["step"] == 12
    rows = read_rows(tmp_path / "run", "snapshot")
    assert sorted((row["step"], "error" in row) for row in rows) == [(5, False), (10, True), (12, False)]


def _train_with_slow_write_of_step_5(*argv: str) -> tuple[int, str, str]:
    """The write ends 1.2 seconds after the save of step 10 has been skipped: longer than one wait of the last save."""
    write, save, is_skipped = SnapshotStorage.write, SnapshotManager.save, threading.Event()

    def slow_write(storage: SnapshotStorage, snapshot: dict[str, Any], best_step: int | None) -> None:
        if snapshot["step"] == 5:
            assert is_skipped.wait(60)
            time.sleep(1.2)
        write(storage, snapshot, best_step)

    def observed_save(manager: SnapshotManager, header: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        save(manager, header, *args, **kwargs)
        if header["step"] == 10:
            is_skipped.set()

    SnapshotStorage.write, SnapshotManager.save = slow_write, observed_save  # type: ignore[method-assign]
    return run_captured(*argv)


# Run folders that ranks do not share


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt, full/, a run of 12 steps, and rank0/ and rank1/, six steps on two machines."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    options = {"optimizer__decay_steps": 12}
    assert run_ranks(2, train_main, *run_args(folder / "full", text, **options), tmp_path=folder) == [0, 0]
    train_on_two_machines(folder, *run_args(folder / "RANK", text, trainer__max_steps=6, **options))
    return folder


def train_on_two_machines(folder: Path, *argv: str) -> str:
    """Trains on two ranks, with rank0 or rank1 in place of RANK; returns stdout of rank 0."""
    (status, out, err), (other_status, other_out, _) = run_ranks(2, _train_on_machine, *argv, tmp_path=folder)
    assert status == other_status == 0, err
    assert other_out == ""
    return out


def _train_on_machine(*argv: str) -> tuple[int, str, str]:
    os.environ["LOCAL_RANK"] = "0"
    return run_captured(*(word.replace("RANK", f"rank{os.environ['RANK']}") for word in argv))


@pytest.mark.parametrize(
    "fault",
    [
        "rank 0 has a damaged one",
        "rank 1 has none",
        pytest.param("rank 0 has none", marks=pytest.mark.slow),
        pytest.param("rank 0 has an older one", marks=pytest.mark.slow),
        pytest.param("none", marks=pytest.mark.slow),
    ],
)
def test_ranks_resume_from_the_newest_snapshot_of_any_machine(fault: str, trained: Path, tmp_path: Path) -> None:
    for name in ("rank0", "rank1"):
        assert SnapshotStorage(str(trained / name / "snapshots"), keep=3).steps() == [3, 6]
        shutil.copytree(trained / name, tmp_path / name)
    if fault.endswith("has none"):
        shutil.rmtree(tmp_path / f"rank{fault[5]}")
    elif fault == "rank 0 has an older one":
        (tmp_path / "rank0/snapshots/step_00000006.pt").unlink()
    elif fault == "rank 0 has a damaged one":
        for file in (tmp_path / "rank0/snapshots").glob("step_*"):
            file.write_bytes(file.read_bytes()[:-1])
    options = {"trainer__save_every": 20, "optimizer__decay_steps": 12, "distributed__strategy": "zero1"}
    out = train_on_two_machines(tmp_path, *run_args(tmp_path / "RANK", trained / "text.txt", **options))
    source = 0 if fault in ("rank 1 has none", "none") else 1
    assert f"snapshots are written by ranks [0, 1], which share no folder; the newest is rank {source}'s" in out
    for name in ("rank0", "rank1"):
        assert_equal_snapshots(tmp_path / name, trained / "full")
        # Each machine has the snapshot that the run resumed from, so that the loss of the other is harmless.
        assert load_snapshot(str(tmp_path / name / "snapshots/step_00000006.pt"))["step"] == 6
    assert loss_curve(tmp_path / "rank0")[-6:] == loss_curve(trained / "full")[-6:]


def test_a_run_does_not_start_anew_if_the_only_snapshots_are_damaged_ones_of_another_machine(
    trained: Path, tmp_path: Path
) -> None:
    for name in ("rank0", "rank1"):
        (tmp_path / name / "snapshots").mkdir(parents=True)
    (tmp_path / "rank1/snapshots/step_00000006.pt").write_bytes(b"damaged")
    argv = run_args(tmp_path / "RANK", trained / "text.txt")
    (status, _, err), (other_status, _, _) = run_ranks(2, _train_on_machine, *argv, tmp_path=tmp_path)
    assert (status, other_status) == (2, 2)
    assert f"error: rank 1: trainer.snapshot_path: all 1 snapshots in {tmp_path}/rank1/snapshots are damaged" in err


def test_machines_that_share_a_folder_write_one_snapshot(text: Path, tmp_path: Path) -> None:
    out = train_on_two_machines(tmp_path, *run_args(tmp_path / "run", text, trainer__max_steps=1))
    assert "snapshots are written by ranks" not in out
    assert list_snapshots(tmp_path / "run") == ["step_00000001.pt"]


def test_machines_that_share_a_folder_without_rank_0_have_one_writer(tmp_path: Path) -> None:
    assert run_ranks(3, _elect_writers, tmp_path, tmp_path=tmp_path) == [[0, 1]] * 3
    assert not [*tmp_path.rglob("*.mark")]


def _elect_writers(folder: Path) -> list[int]:
    """Rank 0 has a folder for itself, and ranks 1 and 2, on two machines, have another."""
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    storage = SlowlyMarkedStorage(str(folder / ("first" if rank == "0" else "other")), keep=1)
    with open_process_group() as context:
        return elect_writer_ranks(context, storage)


class SlowlyMarkedStorage(SnapshotStorage):
    """Both machines look for a marker before either has put one."""

    def put_marker(self, name: str) -> None:
        time.sleep(0.5)
        super().put_marker(name)


# Incompatible snapshots


@pytest.mark.parametrize(
    ("name", "saved", "shown"),
    [
        ("model.n_layer", 3, "is 4, but 3"),
        ("model.n_head", 1, "is 4, but 1"),
        ("model.n_embd", 48, "is 128, but 48"),
        ("model.bias", False, "is true, but false"),
        ("model.conv_kernel_size", 4, "is null, but 4"),
        ("data.block_size", 7, "is 64, but 7"),
        ("data.train_split", 0.5, "is 0.9, but 0.5"),
        ("data.truncate", 0.5, "is null, but 0.5"),
        ("optimizer.name", "adamw", "is muon, but adamw"),
        ("trainer.seed", 7, "is 1, but 7"),
    ],
)
def test_a_kept_key_that_differs_is_refused_with_both_values(name: str, saved: Any, shown: str) -> None:
    config = Config()
    header = {"config": config_to_dict(config)}
    header["config"]["model"]["dropout"] = header["config"]["optimizer"]["learning_rate"] = 0.5
    assert fit_config(config, header, "SOURCE", KEPT_KEYS, adopts_shape=False) == config
    section, key = name.split(".")
    header["config"][section][key] = saved
    value = shown.partition("but ")[2]
    with pytest.raises(UserError, match=rf"^{name} {shown} in SOURCE: set it to {value}, or ADVICE$"):
        fit_config(config, header, "SOURCE", KEPT_KEYS, adopts_shape=False, advice=", or ADVICE")
    if name in SHAPE_KEYS:
        adopted = fit_config(config, header, "SOURCE", KEPT_KEYS, adopts_shape=True)
        assert getattr(getattr(adopted, section), key) == saved


def test_a_snapshot_of_another_vocabulary_optimizer_or_part_of_the_text_ends_the_run(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "full", tmp_path / "run")
    text = tmp_path / "text.txt"
    text.write_text((trained / "text.txt").read_text().replace("f", "ß") + "".join(map(chr, range(0x4E00, 0x6000))))
    [(status, _, err)] = run_ranks(1, run_captured, *run_args(tmp_path / "run", text), tmp_path=tmp_path)
    assert status == 2
    size = len(set((trained / "text.txt").read_text()))
    new = reprlib.repr("ß" + "".join(map(chr, range(0x4E00, 0x6000))))
    assert err.startswith(
        f"error: data.path: the text has {size + 4608} distinct characters, but the snapshot of step 12 in the run "
        f"folder {size} (only in the text: {new} (4,609 distinct); only in the snapshot: 'f' (1 distinct)): use the "
        "snapshot's text"
    )
    for key, now, then in (("optimizer.name", "muon", "adamw"), ("data.truncate", "0.5", "null")):
        argv = run_args(tmp_path / "run", trained / "text.txt", trainer__max_steps=13)
        [(status, _, err)] = run_ranks(1, run_captured, *argv, f"--{key}", now, tmp_path=tmp_path)
        assert status == 2
        assert err.startswith(f"error: {key} is {now}, but {then} in the snapshot of step 12 in the run folder: ")
