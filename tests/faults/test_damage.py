"""A damaged snapshot is noticed, named, and skipped in favour of the one before it."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import run_args, run_ranks, train_main, write_text

from mingpt.snapshot.digest import TRAILER_SIZE
from mingpt.snapshot.storage import SnapshotStorage


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshots of a run, at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__max_steps=6)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    return folder / "run/snapshots"


@pytest.fixture
def newest_file(snapshots: Path) -> Iterator[Path]:
    """The newest snapshot, which is restored after the test."""
    file = snapshots / "step_00000006.pt"
    content = file.read_bytes()
    yield file
    file.write_bytes(content)
    messages: list[str] = []
    assert SnapshotStorage(str(snapshots), keep=9).load_newest(messages.append)["step"] == 6
    assert messages == []


def assert_named_and_skipped(file: Path, damage: str, reason: str = "") -> None:
    messages: list[str] = []
    used = SnapshotStorage(str(file.parent), keep=9).load_newest(messages.append)
    assert used is not None, damage
    assert used["step"] == 3, damage
    assert len(messages) == 2, (damage, messages)
    assert messages[0].startswith(f"{file} is damaged ({reason}"), (damage, messages)
    assert messages[1] == f"{file.with_name('step_00000003.pt')} is used instead", damage


def assert_flips_are_noticed(file: Path, bits: list[int]) -> None:
    content = bytearray(file.read_bytes())
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        assert_named_and_skipped(file, f"bit {bit}")
        content[bit // 8] ^= 1 << bit % 8


def test_a_flipped_bit_at_the_edge_of_a_region_is_noticed(newest_file: Path) -> None:
    """Edges of the file, the archive, the trailer's magic string and the trailer's digest."""
    end = 8 * newest_file.stat().st_size
    trailer = end - 8 * TRAILER_SIZE
    assert_flips_are_noticed(newest_file, [0, trailer - 1, trailer, end - 8 * 32 - 1, end - 8 * 32, end - 1])


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_noticed(newest_file: Path) -> None:
    assert_flips_are_noticed(newest_file, random.Random(0).sample(range(8 * newest_file.stat().st_size), 500))


def test_a_truncated_file_is_noticed(newest_file: Path) -> None:
    content = newest_file.read_bytes()
    edges = [1, TRAILER_SIZE - 1, TRAILER_SIZE, TRAILER_SIZE + 1, len(content) - TRAILER_SIZE, len(content) - 1]
    for size in [*range(0, len(content), 4096), *edges]:
        newest_file.write_bytes(content[:size])
        assert_named_and_skipped(newest_file, f"{size} bytes", f"{size} bytes without the mark at the end: cut short")


def test_appended_bytes_are_noticed(newest_file: Path) -> None:
    content = newest_file.read_bytes()
    for appended in (b"\0", b"\0" * TRAILER_SIZE, content):
        newest_file.write_bytes(content + appended)
        assert_named_and_skipped(newest_file, f"{len(appended)} bytes appended")


def test_a_block_of_zeros_is_noticed(newest_file: Path) -> None:
    """A disk returns zeros for a block that was never written."""
    content = newest_file.read_bytes()
    for size in (512, 4096):
        for start in range(0, len(content), size):
            block = content[start : start + size]
            if any(block):
                newest_file.write_bytes(content[:start] + bytes(len(block)) + content[start + size :])
                assert_named_and_skipped(newest_file, f"block of {size} at {start}")
