"""Snapshots in an object store: a real S3 server, reached the way a user would, that stumbles, dies and comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from helpers import loss_curve, read_rows, run_args, run_program, run_ranks, train_main
from store import Proxy, healthy, in_turn, s3_server

from mingpt.snapshot import storage
from mingpt.snapshot.storage import SnapshotStorage, load_snapshot
from mingpt.utils.errors import UserError

WHY = "needs pip install -r .ci/requirements.txt"
pytest.importorskip("moto", reason=WHY)
s3fs = pytest.importorskip("s3fs", reason=WHY)

pytestmark = pytest.mark.slow

ACCOUNT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
PART = 5 << 20  # the least that S3 takes for a part of an upload
NUMBERS = count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def store(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The server behind a proxy, which the environment names; the program retries, and botocore does not."""
    proxy = Proxy(server)
    endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    for name, value in (ACCOUNT | {"AWS_ENDPOINT_URL": endpoint, "AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "RETRIES", (0.01, 0.02, 0.03))
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps its endpoint
    yield proxy
    proxy.stop()


@pytest.fixture
def url(store: Proxy) -> str:
    """A folder in a bucket that nobody has used."""
    bucket = f"bucket-{next(NUMBERS)}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/a/run"


def small(step: int, tensors: int = 1, size: int = 12) -> dict[str, Any]:
    return {"step": step, "model": {f"{i}": torch.full((size,), float(step)) for i in range(tensors)}}


def large(step: int) -> dict[str, Any]:
    """Goes up in three parts."""
    return small(step, tensors=6, size=PART // 10)


def seen_afresh(url: str) -> SnapshotStorage:
    """The folder as another process would see it: nothing is cached."""
    s3fs.S3FileSystem.clear_instance_cache()
    return SnapshotStorage(url, keep=1)


def assert_newest_is(step: int, url: str) -> None:
    """Whole, and nothing is damaged."""
    said: list[str] = []
    newest = seen_afresh(url).newest(said.append)
    assert newest is not None
    assert (newest["step"], said) == (step, [])
    assert all((weight == step).all() for weight in newest["model"].values())


def unfinished_uploads(url: str) -> list[dict]:
    bucket = url.split("/")[2]
    return fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])


# A folder in the store


def test_snapshots_are_written_found_loaded_and_pruned(url: str) -> None:
    folder = SnapshotStorage(url, keep=2)
    assert folder.newest(print) is None
    assert folder.write(small(1), None) == f"{url}/step_00000001.pt"
    for step in (2, 3, 4, 5):
        folder.write(small(step), 2)
    assert SnapshotStorage(url, keep=2).steps() == folder.steps() == [2, 4, 5]
    assert_newest_is(5, url)
    assert (load_snapshot(folder.file(2))["model"]["0"] == 2).all()

    fs = fsspec.filesystem("s3")
    content = bytearray(fs.cat_file(folder.file(5)))
    content[1000] ^= 1
    fs.pipe_file(folder.file(5), bytes(content))
    said: list[str] = []
    newest = folder.newest(said.append)
    assert newest is not None
    assert newest["step"] == 4
    assert [line.split()[0] for line in said] == [folder.file(5), folder.file(4)]


STUMBLES = {
    "some 503": ["503"] * 3,
    "a slow answer": ["slow"],
    "a cut upload": ["cut request"],
    "many cut uploads": ["cut request"] * 12,  # more than s3fs repeats by itself
    "a lost answer": ["cut answer"],
    "many lost answers": ["cut answer"] * 12,
    "a bit of all": ["503", "cut request", "503", "cut answer", "slow"],
}


@pytest.mark.parametrize(
    ("name", "what"),
    [(name, small) for name in STUMBLES] + [(name, large) for name in STUMBLES if not name.startswith("many")],
)
def test_a_store_that_stumbles_gets_the_whole_file(
    name: str, what: Callable[[int], dict[str, Any]], store: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART})
    seen_afresh(url).write(what(1), None)
    uploads, store.uploads = store.uploads - 1, 0  # without the one that made the bucket
    assert uploads == (1 if what is small else 5)  # start, three parts, end
    for before in range(uploads):
        store.met.clear()
        store.rule = in_turn(*[""] * before, *STUMBLES[name])
        seen_afresh(url).write(what(before + 2), None)
        assert store.met == STUMBLES[name]
        assert seen_afresh(url).steps() == [before + 2]
        assert_newest_is(before + 2, url)
    if "cut answer" not in STUMBLES[name]:  # else the store has begun uploads whose names it could not tell
        assert unfinished_uploads(url) == []


@pytest.mark.parametrize("fault", ["503", "cut request", "cut answer"])
def test_a_store_that_stumbles_is_read(fault: str, store: Proxy, url: str) -> None:
    SnapshotStorage(url, keep=1).write(small(3), None)
    for asked in ("list-type", "step_00000003.pt"):
        left = [fault] * 2
        store.rule = lambda request, asked=asked, left=left: left.pop() if left and asked in request else ""
        assert_newest_is(3, url)
        assert left == []


@pytest.mark.parametrize("fault", ["503", "cut request", "silent", "refused"])
def test_a_store_that_stays_dead_is_a_users_error_and_costs_nothing_that_was_there(
    fault: str, store: Proxy, server: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRIES", ())
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 0.1}})
    folder = seen_afresh(url)
    folder.write(small(1), None)
    store.rule = lambda request: fault
    if fault == "refused":
        store.stop()
    with pytest.raises(UserError, match=r"trainer\.snapshot_path: s3://.*/step_00000002\.pt"):
        folder.write(small(2), None)
    with pytest.raises(UserError, match=r"trainer\.snapshot_path: s3://"):  # and not: there is none
        seen_afresh(url).newest(print)
    again = Proxy(server, store.server_address[1]) if fault == "refused" else store
    again.rule = healthy
    assert_newest_is(1, url)
    folder.write(small(3), None)
    assert seen_afresh(url).steps() == [3]
    assert_newest_is(3, url)
    if again is not store:
        again.stop()


@pytest.mark.parametrize("requests_before", [0, 1, 2, 3, 4])
def test_an_upload_that_fails_midway_is_discarded(
    requests_before: int, store: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART})
    monkeypatch.setattr(storage, "RETRIES", ())
    folder = seen_afresh(url)
    folder.write(small(1), None)
    store.rule = in_turn(*[""] * requests_before, "503")
    with pytest.raises(UserError, match="can't be written"):
        folder.write(large(2), None)
    assert store.met == ["503"]
    assert seen_afresh(url).steps() == [1]
    assert_newest_is(1, url)
    assert unfinished_uploads(url) == []
    folder.write(large(3), None)
    assert_newest_is(3, url)


def test_a_store_that_dies_midway_and_comes_back_shows_no_half_file(
    store: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART})
    monkeypatch.setattr(storage, "RETRIES", ())
    folder = seen_afresh(url)
    folder.write(small(1), None)
    left = ["", "", "503"]
    store.rule = lambda request: (left.pop(0) if len(left) > 1 else left[0]) if "step" in request else ""
    with pytest.raises(UserError, match="can't be written"):
        folder.write(large(2), None)
    store.rule = healthy
    gc.collect()  # an open file that is forgotten closes itself
    assert seen_afresh(url).steps() == [1]


class Interruption(BaseException):
    """Such as KeyboardInterrupt."""


class Interrupting:
    def __reduce__(self) -> tuple:
        raise Interruption


def test_a_save_that_is_interrupted_midway_shows_no_file(url: str) -> None:
    folder = SnapshotStorage(url, keep=1)
    folder.write(small(1), None)
    with pytest.raises(Interruption):
        folder.write(small(2) | {"z": Interrupting()}, None)
    gc.collect()  # an open file that is forgotten closes itself
    assert seen_afresh(url).steps() == [1]


# Whole runs


def assert_same_end(run_dir: Path, url: str, local: Path) -> None:
    mine = seen_afresh(url).newest(print)
    other = SnapshotStorage(str(local / "snapshots"), keep=9).newest(print)
    assert mine is not None
    assert other is not None
    assert mine["step"] == other["step"]
    for name, weight in mine["model"].items():
        assert weight.equal(other["model"][name]), name
        for key, value in mine["optimizer"][name].items():
            assert value.equal(other["optimizer"][name][key]), (name, key)
    assert loss_curve(run_dir) == loss_curve(local)


def test_a_run_resumes_from_the_store_bit_for_bit(url: str, text: Path, tmp_path: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    assert run_ranks(1, train_main, *run_args(local, text), tmp_path=tmp_path) == [0]
    for stop in (7, 12):
        knobs = {"trainer__snapshot_path": url, "trainer__max_steps": stop, "optimizer__decay_steps": 12}
        done = run_program("main.py", *run_args(run, text, **knobs))
        assert (done.returncode, done.stderr) == (0, "")
    assert f"going on from {url}/step_00000007.pt" in done.stdout
    assert [row["step"] for row in read_rows(run, "start")] == [0, 7]
    assert not (run / "snapshots").exists()
    assert_same_end(run, url, local)


@pytest.mark.parametrize("lost", [[6], [9, 12]])
def test_a_run_goes_on_while_the_store_is_down(
    lost: list[int], store: Proxy, url: str, text: Path, tmp_path: Path
) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    assert run_ranks(1, train_main, *run_args(local, text), tmp_path=tmp_path) == [0]
    store.rule = lambda request: "503" if any(f"step_{step:08d}" in request for step in lost) else ""
    argv = run_args(run, text, trainer__snapshot_path=url)
    done = run_program("main.py", *argv)
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [step for step in (3, 6, 9, 12) if any(f"{url}/step_{step:08d}.pt" in line for line in said)] == lost
    assert [row["step"] for row in read_rows(run, "snapshot") if "error" in row] == lost
    assert done.returncode == (2 if 12 in lost else 0)
    assert loss_curve(run) == loss_curve(local)

    store.rule = healthy
    assert seen_afresh(url).steps() == [step for step in (3, 6, 9, 12) if step not in lost]
    again = run_program("main.py", *argv)
    assert (again.returncode, again.stderr) == (0, "")
    assert ("already trained" in again.stdout) == (12 not in lost)
    assert_same_end(run, url, local)


def test_a_run_that_cannot_ask_the_store_does_not_start_anew(
    store: Proxy, url: str, text: Path, tmp_path: Path
) -> None:
    argv = run_args(tmp_path / "run", text, trainer__snapshot_path=url)
    assert run_program("main.py", *argv, "--trainer.max_steps", "6").returncode == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    for asked in ("list-type", "step_00000006.pt"):
        store.rule = lambda request, asked=asked: "503" if asked in request else ""
        done = run_program("main.py", *argv)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("error: ") == 1
        assert "Traceback" not in done.stderr
        assert "trainer.snapshot_path" in done.stderr
        assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    store.rule = healthy
    assert seen_afresh(url).steps() == [3, 6]
