"""A damaged snapshot is always noticed, named, and skipped in favour of the one before it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import run_args, run_ranks, train_main, write_text

from mingpt.snapshot.storage import TRAILER, SnapshotStorage


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshots of a run, at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    argv = run_args(folder / "run", text, trainer__max_steps=6)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    return folder / "run/snapshots"


@pytest.fixture
def newest_file(trained: Path) -> Iterator[Path]:
    """The newest snapshot, which a test may change: what was in it comes back."""
    file = trained / "step_00000006.pt"
    content = file.read_bytes()
    yield file
    file.write_bytes(content)
    said: list[str] = []
    assert SnapshotStorage(str(trained), keep=9).newest(said.append)["step"] == 6
    assert said == []


def assert_named_and_skipped(file: Path, what: str, reason: str = "") -> None:
    said: list[str] = []
    used = SnapshotStorage(str(file.parent), keep=9).newest(said.append)
    assert used is not None
    assert used["step"] == 3, what
    assert len(said) == 2, (what, said)
    assert said[0].startswith(f"{file} is damaged ({reason}"), (what, said)
    assert said[1] == f"{file.with_name('step_00000003.pt')} is used instead", what


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(newest_file: Path) -> None:
    content = bytearray(newest_file.read_bytes())
    bits = 8 * len(content)
    ends = [
        0,
        bits - 1,
        bits - 8 * TRAILER,
        bits - 8 * TRAILER - 1,
        bits - 8 * 32,
    ]  # of the file, the archive, the mark
    for bit in [*random.Random(0).sample(range(bits), 500), *ends]:
        content[bit // 8] ^= 1 << bit % 8
        newest_file.write_bytes(content)
        assert_named_and_skipped(newest_file, f"bit {bit}")
        content[bit // 8] ^= 1 << bit % 8


def test_every_cut_is_noticed(newest_file: Path) -> None:
    content = newest_file.read_bytes()
    near_the_ends = [1, TRAILER - 1, TRAILER, TRAILER + 1, len(content) - TRAILER, len(content) - 1]
    for size in [*range(0, len(content), 4096), *near_the_ends]:
        newest_file.write_bytes(content[:size])
        assert_named_and_skipped(newest_file, f"{size} bytes", f"{size} bytes without the mark at the end: cut short")


def test_a_file_that_has_grown_is_noticed(newest_file: Path) -> None:
    content = newest_file.read_bytes()
    for more in (b"\0", b"\0" * TRAILER, content):
        newest_file.write_bytes(content + more)
        assert_named_and_skipped(newest_file, f"{len(more)} bytes more")


@pytest.mark.parametrize("size", [512, 4096])
def test_every_lost_block_is_noticed(size: int, newest_file: Path) -> None:
    """What a disk gives for a block that it never wrote: zeros."""
    content = newest_file.read_bytes()
    for start in range(0, len(content), size):
        lost = content[:start] + bytes(len(content[start : start + size])) + content[start + size :]
        if lost != content:
            newest_file.write_bytes(lost)
            assert_named_and_skipped(newest_file, f"block at {start}")
