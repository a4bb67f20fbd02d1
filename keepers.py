"""Who keeps snapshots, and whose is taken? For machines that share a folder, and for those that do not."""

from __future__ import annotations

import uuid
from typing import Any

from distributed import World
from errors import UserError
from screen import Say
from snapshot import SnapshotFolder


def elect_keepers(world: World, folder: SnapshotFolder) -> list[int]:
    """Rank 0, and the first rank of each machine that does not see rank 0's snapshot folder: they write snapshots.

    Raises:
        UserError: one of them can't.
    """
    mark = world.broadcast(uuid.uuid4().hex)
    world.agree(lambda: folder.mark(mark) if world.rank == 0 else None)
    apart = world.agree(lambda: world.local_rank == 0 and world.rank > 0 and not folder.is_marked(mark))
    keepers = [rank for rank, keeps in enumerate(world.gather(world.rank == 0 or apart)) if keeps]
    world.agree(lambda: folder.mark(mark) if apart else None)
    if world.rank in keepers:
        folder.unmark(mark)
    return keepers


def elect_snapshot(
    world: World, folder: SnapshotFolder, keepers: list[int], say: Say
) -> tuple[dict[str, Any] | None, int, bool]:
    """The newest whole snapshot that any keeper has, on the rank that holds it (None on others), and that rank.

    The third is whether this rank has it, too.

    Raises:
        UserError: there are snapshots, and none of them is whole.
    """
    snapshot, trouble = None, ""
    remarks: list[str] = []
    if world.rank in keepers:
        try:
            snapshot = folder.newest(remarks.append)
        except UserError as error:
            trouble = str(error)
    held = world.gather((-1 if snapshot is None else snapshot["step"], remarks, trouble))
    steps = [step for step, _, _ in held]
    holder = steps.index(max(steps))
    for rank, (_, lines, words) in enumerate(held):
        for line in lines + ([words] if words else []):
            say(f"rank {rank}: {line}" if rank else line)
        if words and max(steps) < 0:
            raise UserError(f"rank {rank}: {words}" if rank else words)
    if len(keepers) > 1:
        say(f"snapshots are kept by ranks {keepers}, which share no folder; the newest is of rank {holder}")
    return (snapshot if world.rank == holder else None), holder, steps[world.rank] == max(steps)
