"""What survives a failure: written whole, verified, found, pruned, and loaded without running code."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from helpers import (
    SMALL_CONFIG,
    assert_equal_snapshots,
    loss_curve,
    newest_snapshot,
    read_rows,
    run_args,
    run_captured,
    run_ranks,
    train_main,
    write_text,
)

from mingpt.config import GPTConfig, OptimizerConfig
from mingpt.config_parser import read_config
from mingpt.optimizer import learning_rate
from mingpt.snapshot.storage import (
    CHUNK,
    MARK,
    OLD_MARK,
    DamagedSnapshotError,
    PruneError,
    SnapshotStorage,
    _HashingFile,
    load_snapshot,
)
from mingpt.utils.errors import UserError
from model import GPT

STEPS = 6  # of the run that most tests here look at: snapshots after steps 3 and 6
FIXED = {"trainer__max_steps": STEPS, "optimizer__decay_steps": 12}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and two runs of six steps: one/ on one rank, two/ on two."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    for number, name in ((1, "one"), (2, "two")):
        assert run_ranks(number, train_main, *run_args(folder / name, text, **FIXED), tmp_path=folder) == [0] * number
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """The one-rank run, to be changed."""
    return shutil.copytree(trained / "one", tmp_path / "run")


@pytest.fixture
def memory() -> Iterator[str]:
    """URL of a folder in fsspec's memory."""
    yield "memory://tests/snapshots"
    fsspec.filesystem("memory").rm("/tests", recursive=True)


def small(step: int, val_loss: float | None = None) -> dict[str, Any]:
    """The least that a folder takes for a snapshot."""
    return {"step": step, "model": {"weight": torch.full((3, 4), float(step))}, "val_loss": val_loss}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps(*numbers: int) -> list[str]:
    return [f"step_{number:08d}.pt" for number in numbers]


def flip(file: Path, place: int = 1000) -> None:
    """Flips one bit."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


# What is in it


@pytest.mark.parametrize("name", ["one", "two"])
def test_any_program_can_open_it_and_finds_what_is_documented(name: str, trained: Path) -> None:
    file = trained / name / "snapshots/step_00000006.pt"
    snapshot = torch.load(file, weights_only=True)
    text = (trained / "text.txt").read_text()
    assert isinstance(snapshot["format"], int)
    assert (snapshot["step"], snapshot["samples"]) == (6, 6 * SMALL_CONFIG["trainer.batch_size"])
    assert snapshot["vocabulary"] == "".join(sorted(set(text)))
    assert snapshot["scaler"] == {}  # nothing is scaled in fp32
    assert snapshot["val_loss"] == read_rows(trained / name, "eval")[-1]["val_loss"]

    met = snapshot["config"]["distributed"].pop("init_method")
    assert met.startswith("file://")
    asked = read_config(run_args(trained / name, trained / "text.txt", **FIXED))
    expected = json.loads(json.dumps(asdict(asked)))  # tuples become lists
    del expected["distributed"]["init_method"]
    assert snapshot["config"] == expected
    assert {type(keys) for keys in (snapshot["config"], *snapshot["config"].values())} == {dict}

    shape = snapshot["config"]["model"] | {"block_size": 16, "vocab_size": len(snapshot["vocabulary"])}
    model = GPT(GPTConfig(**shape))
    model.load_state_dict(snapshot["model"])  # strict: every name, and no other
    assert set(snapshot["model"]) == {name for name, _ in model.named_parameters()}
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.bias"} <= set(snapshot["model"])
    assert set(snapshot["optimizer"]) == set(snapshot["model"])
    for state in snapshot["optimizer"].values():
        assert int(state["step"]) == 6


def test_without_an_evaluation_at_its_step_its_validation_loss_is_null(trained: Path) -> None:
    assert load_snapshot(str(trained / "one/snapshots/step_00000003.pt"))["val_loss"] is None


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path / "made/on/the/way"), keep=3)
    for step in (7, 12_345_678):
        path = folder.write(small(step) | {"text": "ü\n", "none": None, "half": torch.ones(2).bfloat16()}, None)
        assert path == str(tmp_path / f"made/on/the/way/step_{step:08d}.pt")
        found = load_snapshot(path)
        assert torch.equal(found["model"]["weight"], small(step)["model"]["weight"])
        assert torch.equal(found["half"], torch.ones(2).bfloat16())
        assert (found["step"], found["text"], found["none"]) == (step, "ü\n", None)
    assert folder.steps() == [7, 12_345_678]
    assert names(tmp_path / "made/on/the/way") == steps(7, 12_345_678)


class Witness:
    """Notes what is in a folder while it is itself being saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        self.seen = names(self.folder)
        return str, ()


def test_under_its_name_there_is_nothing_until_it_is_whole(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=1)
    folder.write(small(1), None)
    witness = Witness(tmp_path)
    folder.write(small(2) | {"witness": witness}, None)
    [older, unfinished] = witness.seen
    assert [older] == steps(1)
    assert unfinished.endswith(".tmp")
    assert names(tmp_path) == steps(2)


def test_files_are_written_with_the_users_own_mode(text: Path, tmp_path: Path) -> None:
    [modes] = run_ranks(
        1, _modes_under_umask, *run_args(tmp_path / "run", text, trainer__max_steps=1), tmp_path=tmp_path
    )
    assert {"config.yaml", "metrics.jsonl", "step_00000001.pt", "text.json"} <= set(modes)
    assert set(modes.values()) == {0o640}


def _modes_under_umask(*argv: str) -> dict[str, int]:
    os.umask(0o027)
    assert train_main(*argv) == 0
    run = Path(argv[argv.index("--trainer.run_dir") + 1])
    return {path.name: path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file()}


def test_later_changes_do_not_reach_what_was_loaded(trained: Path, tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=3)
    shutil.copy(trained / "one/snapshots/step_00000006.pt", tmp_path)
    loaded, untouched = load_snapshot(folder.file(6)), torch.load(folder.file(6), weights_only=True)["model"]
    shape = loaded["config"]["model"] | {"block_size": 16, "vocab_size": len(loaded["vocabulary"])}
    model = GPT(GPTConfig(**shape))
    model.load_state_dict(loaded["model"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    folder.write(loaded | {"model": model.state_dict()}, None)  # over the file that is mapped into memory
    for name, weight in loaded["model"].items():
        assert torch.equal(weight, untouched[name]), name

    changed = load_snapshot(folder.file(6))
    changed["model"]["transformer.wte.weight"].zero_()
    assert load_snapshot(folder.file(6))["model"]["transformer.wte.weight"].all()


def test_a_url_is_written_found_and_pruned_like_a_folder(memory: str) -> None:
    folder = SnapshotStorage(memory, keep=2)
    assert folder.newest(print) is None
    assert folder.write(small(1), None) == f"{memory}/step_00000001.pt"
    for step in (2, 3, 4):
        folder.write(small(step), 2)
    assert torch.equal(load_snapshot(f"{memory}/step_00000002.pt")["model"]["weight"], small(2)["model"]["weight"])
    again = SnapshotStorage(memory, keep=2)
    assert again.steps() == [2, 3, 4]
    assert len(fsspec.filesystem("memory").ls("/tests/snapshots")) == 3
    assert again.newest(print)["step"] == 4

    with fsspec.open(f"{memory}/step_00000004.pt", "rb") as file:
        content = file.read()
    with fsspec.open(f"{memory}/step_00000004.pt", "wb") as file:
        file.write(content[:-1])
    said: list[str] = []
    assert again.newest(said.append)["step"] == 3
    assert [line.split()[0] for line in said] == [f"{memory}/step_00000004.pt", f"{memory}/step_00000003.pt"]


# Damage


class Bait:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_snapshot_is_refused_and_does_not_run(zipped: bool, tmp_path: Path) -> None:
    trap = tmp_path / "made by code"
    buffer = io.BytesIO()
    torch.save(small(1) | {"bait": Bait(trap)}, buffer, _use_new_zipfile_serialization=zipped)
    content = buffer.getvalue()
    file = tmp_path / "snapshots/step_00000001.pt"
    file.parent.mkdir()
    assert len(content) < CHUNK
    file.write_bytes(content + MARK + hashlib.sha256(hashlib.sha256(content).digest()).digest())
    with pytest.raises(DamagedSnapshotError):
        load_snapshot(str(file))
    with pytest.raises(UserError, match="damaged"):
        SnapshotStorage(str(file.parent), keep=1).newest(print)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Bait(trap)))  # the trap works
    assert trap.exists()


@pytest.mark.parametrize("floats", [0, 100_000, 262_144, 700_000])
def test_the_trailer_is_of_every_mebibyte(floats: int, tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=1)
    file = Path(folder.write({"step": 1, "model": {"weight": torch.rand(floats)}}, None))
    content, trailer = file.read_bytes()[:-40], file.read_bytes()[-40:]
    chunks = [content[start : start + 2**20] for start in range(0, len(content), 2**20)]
    digests = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    assert trailer == MARK + hashlib.sha256(digests).digest()
    for place in {0, len(content) - 1, *range(2**20 - 1, len(content), 2**20)}:
        flipped = bytearray(file.read_bytes())
        flipped[place] ^= 1
        (tmp_path / "flipped.pt").write_bytes(flipped)
        with pytest.raises(DamagedSnapshotError, match="do not match"):
            load_snapshot(str(tmp_path / "flipped.pt"))


def test_content_that_fills_its_last_mebibyte_is_digested_whatever_pieces_it_comes_in() -> None:
    content, trailers = os.urandom(2 * CHUNK), []
    for size in (2 * CHUNK, CHUNK, 300_000, 7):
        buffer = io.BytesIO()
        hashing = _HashingFile(buffer)
        for start in range(0, 2 * CHUNK if size > 7 else 70, size):
            hashing.write(content[start : start + size])
        assert buffer.getvalue() == content[: 2 * CHUNK if size > 7 else 70]
        trailers.append(hashing.trailer())
    halves = b"".join(hashlib.sha256(content[half * CHUNK :][:CHUNK]).digest() for half in (0, 1))
    assert trailers[:3] == [MARK + hashlib.sha256(halves).digest()] * 3
    assert trailers[3] == MARK + hashlib.sha256(hashlib.sha256(content[:70]).digest()).digest()


def test_a_snapshot_with_an_older_trailer_is_read_and_its_damage_noticed(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=1)
    file = Path(folder.write({"step": 1, "model": {"weight": torch.rand(700_000)}}, None))
    content = file.read_bytes()[:-40]
    older = content + OLD_MARK + hashlib.sha256(content).digest()
    weight = load_snapshot(str(file))["model"]["weight"].clone()
    file.write_bytes(older)
    assert torch.equal(load_snapshot(str(file))["model"]["weight"], weight)
    for place in (0, 2**20, len(content) - 1, len(older) - 1):
        flipped = bytearray(older)
        flipped[place] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(DamagedSnapshotError, match="do not match"):
            load_snapshot(str(file))


def test_a_damaged_newest_is_named_and_the_one_before_leads_to_the_same_bits(
    trained: Path, run_dir: Path, tmp_path: Path
) -> None:
    flip(run_dir / "snapshots/step_00000006.pt")
    argv = run_args(run_dir, trained / "text.txt", **FIXED)
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    assert (status, err) == (0, "")
    said = [line for line in out.splitlines() if "step_0000000" in line and ".pt" in line]
    assert f"{run_dir}/snapshots/step_00000006.pt is damaged" in said[0]
    assert said[1].endswith(f"{run_dir}/snapshots/step_00000003.pt is used instead")
    assert_equal_snapshots(trained / "one", run_dir)  # the damaged file has been replaced by a whole one
    assert loss_curve(run_dir) == loss_curve(trained / "one")


def test_where_all_are_damaged_nothing_is_started_anew(trained: Path, run_dir: Path, tmp_path: Path) -> None:
    for name in steps(3, 6):
        flip(run_dir / "snapshots" / name)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    argv = run_args(run_dir, trained / "text.txt", **FIXED)
    results = run_ranks(2, run_captured, *argv, tmp_path=tmp_path)
    assert [status for status, _, _ in results] == [2, 2]
    assert [err.count("error: ") for _, _, err in results] == [1, 0]
    _, out, err = results[0]
    assert "all 2 snapshots" in err
    assert "trainer.snapshot_path" in err
    assert str(run_dir / "snapshots") in err
    for name in steps(3, 6):
        assert f"{name} is damaged" in out
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


# Keeping and pruning


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=2)
    kept = []
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (10, 5)):
        folder.write(small(step), best)
        kept.append(folder.steps())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 10]]


def test_a_run_keeps_its_best_over_a_restart(trained: Path, tmp_path: Path) -> None:
    """A learning rate that overshoots: the first validation loss stays the lowest."""
    knobs = {"trainer__keep_snapshots": 1, "trainer__save_every": 1, "trainer__eval_every": 1}
    knobs |= {"optimizer__warmup_steps": 2, "optimizer__learning_rate": 1.0, "optimizer__decay_steps": 99}
    for stop in (3, 5):
        argv = run_args(tmp_path / "run", trained / "text.txt", trainer__max_steps=stop, **knobs)
        assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    losses = {row["step"]: row["val_loss"] for row in read_rows(tmp_path / "run", "snapshot")}
    best = min(losses, key=losses.__getitem__)
    assert list(losses) == [1, 2, 3, 4, 5]
    assert best < 3, losses  # else this test shows nothing
    assert names(tmp_path / "run/snapshots") == steps(best, 5)


def test_a_damaged_newer_file_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=1)
    folder.write(small(3), None)
    (tmp_path / "step_00000009.pt").write_bytes(b"torn")
    assert folder.newest(print)["step"] == 3
    folder.write(small(6), None)
    assert folder.steps() == [6, 9]
    assert folder.newest(print)["step"] == 6
    assert (tmp_path / "step_00000009.pt").read_bytes() == b"torn"
    folder.write(small(9), None)
    assert folder.steps() == [9]
    assert folder.newest(print)["step"] == 9


def test_what_a_killed_save_left_is_removed_and_other_files_are_not(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=1)
    mine = ["notes.txt", "other.tmp", "step_3.pt", "step_00000001.pt.copy"]
    for name in [*mine, "step_00000004.pt.123.tmp", "step_00000099.pt.4.tmp"]:
        (tmp_path / name).write_text("")
    assert folder.steps() == []
    for step in (5, 6):
        folder.write(small(step), None)
    assert names(tmp_path) == sorted([*mine, "step_00000006.pt"])


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    place = tmp_path / "file/snapshots"
    with pytest.raises(UserError, match=rf"trainer\.snapshot_path: {place}/step_00000001\.pt"):
        SnapshotStorage(str(place), keep=1).write(small(1), None)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_listed_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        UserError, match=rf"trainer\.snapshot_path: {tmp_path}/file/snapshots can't be read: .*directory"
    ):
        SnapshotStorage(f"{tmp_path}/file/snapshots", keep=1).steps()


def test_a_newest_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=3)
    folder.write(small(1), None)
    (tmp_path / "step_00000002.pt").mkdir()
    with pytest.raises(
        UserError, match=r"step_00000002\.pt can't be read: .*directory.*; make it readable, or move it"
    ):
        folder.newest(print)


def test_an_older_one_that_cannot_be_deleted_is_said_and_the_new_one_is_there(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt").mkdir()
    folder = SnapshotStorage(str(tmp_path), keep=1)
    with pytest.raises(PruneError, match=r"step_00000002\.pt is whole, but older ones can't be deleted and stay: "):
        folder.write(small(2), None)
    assert load_snapshot(folder.file(2))["step"] == 2


def test_a_format_of_another_time_is_refused(tmp_path: Path) -> None:
    folder = SnapshotStorage(str(tmp_path), keep=1)
    folder.write(small(1) | {"format": 99}, None)
    with pytest.raises(
        UserError, match=r"step_00000001\.pt has format 99, this program reads 1: take the program that"
    ):
        folder.newest(print)


def test_a_full_disk_is_a_users_error_and_costs_nothing_that_was_there(tmp_path: Path) -> None:
    [message] = run_ranks(1, _write_more_than_fits, str(tmp_path / "snapshots"), tmp_path=tmp_path)
    assert "step_00000003.pt can't be written: [Errno 27] File too large; make room" in message
    folder = SnapshotStorage(str(tmp_path / "snapshots"), keep=1)
    assert folder.steps() == [2]
    assert folder.newest(print)["step"] == 2
    folder.write(small(4), None)
    assert names(tmp_path / "snapshots") == steps(4)


def _write_more_than_fits(path: str) -> str:
    folder = SnapshotStorage(path, keep=1)
    folder.write(small(2), None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # stands for the disk
    try:
        folder.write(small(3) | {"much": torch.zeros(100_000)}, None)
    except UserError as error:
        return str(error)
    return "it fitted"


def test_weights_that_are_not_finite_are_never_saved(trained: Path, tmp_path: Path) -> None:
    """The last step's loss is finite, and its update overflows."""
    overflow = {"optimizer__learning_rate": 1e38, "optimizer__warmup_steps": 0, "trainer__max_steps": 1}
    argv = run_args(tmp_path / "run", trained / "text.txt", **overflow, optimizer__decay_steps=9)
    [(status, out, err)] = run_ranks(1, run_captured, *argv, tmp_path=tmp_path)
    saved = tmp_path / "run/snapshots"
    assert not saved.exists() or names(saved) == []
    assert status == 2, (out, err)
    assert "not finite" in err


# Going on with other knobs


def test_the_learning_rate_follows_the_yaml(trained: Path, run_dir: Path, tmp_path: Path) -> None:
    knobs = {"trainer__max_steps": 8, "optimizer__learning_rate": 1e-12, "optimizer__decay_steps": 20}
    [(status, out, _)] = run_ranks(
        1, run_captured, *run_args(run_dir, trained / "text.txt", **knobs), tmp_path=tmp_path
    )
    assert status == 0
    assert "learning rate" in out.partition("going on from")[2].partition("step 7/8")[0]  # said before the first step
    config = OptimizerConfig(learning_rate=1e-12, warmup_steps=4, decay_steps=20)
    shown = {row["step"]: row["learning_rate"] for row in read_rows(run_dir)}
    assert [shown[step] for step in (7, 8)] == pytest.approx([learning_rate(step, 8, config) for step in (7, 8)])
    before = load_snapshot(str(run_dir / "snapshots/step_00000006.pt"))["model"]
    for name, weight in newest_snapshot(run_dir)["model"].items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-10, msg=name)


def test_the_batch_size_follows_the_yaml(trained: Path, run_dir: Path, tmp_path: Path) -> None:
    argv = run_args(run_dir, trained / "text.txt", **FIXED | {"trainer__max_steps": 8}, trainer__batch_size=5)
    assert run_ranks(1, train_main, *argv, tmp_path=tmp_path) == [0]
    assert newest_snapshot(run_dir)["samples"] == 6 * 7 + 2 * 5
    assert [row["samples"] for row in read_rows(run_dir, "start")] == [0, 42]


def test_a_changed_text_is_said(trained: Path, run_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((trained / "text.txt").read_text()[::-1])
    knobs = FIXED | {"trainer__max_steps": 7}
    [(status, out, _)] = run_ranks(1, run_captured, *run_args(run_dir, text, **knobs), tmp_path=tmp_path)
    assert status == 0
    assert "the text has changed" in out
    for file in (trained / "text.txt", text):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in out


def test_what_has_not_changed_is_not_said(trained: Path, run_dir: Path, tmp_path: Path) -> None:
    knobs = FIXED | {"trainer__max_steps": 7}
    [(status, out, _)] = run_ranks(
        1, run_captured, *run_args(run_dir, trained / "text.txt", **knobs), tmp_path=tmp_path
    )
    assert status == 0
    lines = itertools.takewhile(lambda line: "step 7/" not in line, out.splitlines())
    assert not [line for line in lines if re.search("the text has|the learning rate|damaged", line)]
