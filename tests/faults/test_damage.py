"""A damaged snapshot is noticed."""

import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from mingpt.snapshot.folder import DamagedSnapshotError, fingerprint, load_snapshot
from tests.helpers import train_run


def is_equal(found: Any, expected: Any) -> bool:
    """Whether contents of snapshots are bitwise identical."""
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(is_equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        return fingerprint({"": found}) == fingerprint({"": expected})
    return found == expected


class Damage:
    """Damages a snapshot, loads it, and checks that the damage is noticed or has changed nothing."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.content = file.read_bytes()
        self.expected = load_snapshot(str(shutil.copy(file, file.with_name("expected"))))
        self.noticed = 0
        self.harmless = 0

    def overwrite(self, position: int, data: bytes) -> None:
        end = min(position + len(data), len(self.content))
        self.check(self.content[:position] + data[: end - position] + self.content[end:])

    def check(self, content: bytes) -> None:
        self.file.write_bytes(content)
        try:
            found = load_snapshot(str(self.file))
        except DamagedSnapshotError:
            self.noticed += 1
            return
        assert is_equal(found, self.expected)
        self.harmless += 1

    def outside_of_contents(self) -> list[int]:
        """The positions of all bytes that are not the content of a part of the archive."""
        inside = set()
        with zipfile.ZipFile(self.file) as archive:
            for part in archive.infolist():
                header = self.content[part.header_offset : part.header_offset + 30]
                start = part.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
                inside.update(range(start, start + part.file_size))
        return [position for position in range(len(self.content)) if position not in inside]


def test_damage_is_noticed_or_has_changed_nothing(text: Path, tmp_path: Path) -> None:
    """Between the parts of the archive there is space, and headers have fields that nobody reads."""
    run_dir = train_run(tmp_path / "run", text, trainer__max_steps=3)
    draw, damage = random.Random(0), Damage(run_dir / "snapshots/step_00000003.pt")
    positions = range(len(damage.content))
    outside = damage.outside_of_contents()
    for _ in range(100):
        position = draw.choice(positions)
        damage.overwrite(position, bytes([damage.content[position] ^ (1 << draw.randrange(8))]))
    assert damage.noticed > 80
    for _ in range(300):
        position = draw.choice(outside)
        damage.overwrite(position, bytes([damage.content[position] ^ (1 << draw.randrange(8))]))
        damage.overwrite(draw.choice(outside), draw.randbytes(draw.choice((2, 4, 8, 64, 4096))))
    assert damage.noticed > 300
    assert damage.harmless > 100
    sizes = [*range(0, len(damage.content), 4096), 1, len(damage.content) - 1]
    damage.noticed = 0
    for size in sizes:
        damage.check(damage.content[:size])
    assert damage.noticed == len(sizes)
