"""A damaged snapshot is noticed, named, and skipped in favour of the one before it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import run_args, run_ranks, train_main, write_text

from mingpt.snapshot.storage import SnapshotStorage

Damages = Iterator[tuple[str, bytes]]  # what was done, and the file's content then


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshots of a run, at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__max_steps=6)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    return folder / "run/snapshots"


def flip(content: bytes, bit: int) -> tuple[str, bytes]:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return f"bit {bit} flipped", bytes(damaged)


def flips_at_both_ends(content: bytes) -> Damages:
    """In the archive's first bytes, and in each of the last 64, which hold the digest."""
    size = len(content)
    for byte in (0, 1, *range(size - 64, size)):
        yield flip(content, 8 * byte + byte % 8)


def random_flips(content: bytes) -> Damages:
    for bit in random.Random(0).sample(range(8 * len(content)), 200):
        yield flip(content, bit)


def truncations(content: bytes) -> Damages:
    size = len(content)
    for kept in (*range(0, size, 4096), 1, *range(size - 64, size)):
        yield f"cut to {kept} bytes", content[:kept]


def additions(content: bytes) -> Damages:
    for added in (b"\0", bytes(48), content):
        yield f"{len(added)} bytes appended", content + added


def zero_blocks(content: bytes) -> Damages:
    """A disk returns zeros for a block that was never written."""
    for start in range(0, len(content), 4096):
        block = content[start : start + 4096]
        if any(block):
            yield f"zeros at {start}", content[:start] + bytes(len(block)) + content[start + 4096 :]


@pytest.mark.parametrize(
    "damage",
    [flips_at_both_ends, truncations, additions, zero_blocks, pytest.param(random_flips, marks=pytest.mark.slow)],
)
def test_damage_is_noticed_and_the_snapshot_before_is_used(damage: Callable[[bytes], Damages], snapshots: Path) -> None:
    file, previous = snapshots / "step_00000006.pt", snapshots / "step_00000003.pt"
    content, storage = file.read_bytes(), SnapshotStorage(str(snapshots), keep=9)
    messages: list[str] = []
    for name, damaged in damage(content):
        file.write_bytes(damaged)
        messages.clear()
        used = storage.load_newest(messages.append)
        assert used is not None, name
        assert used["step"] == 3, name
        assert len(messages) == 2, (name, messages)
        assert messages[0].startswith(f"{file} is damaged ("), (name, messages)
        assert "cut to" not in name or "cut short" in messages[0], (name, messages)
        assert messages[1] == f"{previous} is used instead", (name, messages)
    file.write_bytes(content)
    messages.clear()
    assert storage.load_newest(messages.append)["step"] == 6
    assert messages == []
