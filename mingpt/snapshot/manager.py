"""Who keeps snapshots, and whose is taken? For machines that share a folder, and for those that do not."""

from __future__ import annotations

import uuid
from typing import Any

from mingpt.distributed.process_group import DistributedContext
from mingpt.snapshot.storage import SnapshotStorage
from mingpt.utils.errors import UserError
from mingpt.utils.progress import Say


def elect_writer_ranks(context: DistributedContext, folder: SnapshotStorage) -> list[int]:
    """Rank 0, and the first rank of each machine that does not see rank 0's snapshot folder: they write snapshots.

    Raises:
        UserError: one of them can't.
    """
    mark = context.broadcast_object(uuid.uuid4().hex)
    context.raise_on_all_ranks(lambda: folder.mark(mark) if context.rank == 0 else None)
    apart = context.raise_on_all_ranks(
        lambda: context.local_rank == 0 and context.rank > 0 and not folder.is_marked(mark)
    )
    writer_ranks = [rank for rank, keeps in enumerate(context.all_gather_object(context.rank == 0 or apart)) if keeps]
    context.raise_on_all_ranks(lambda: folder.mark(mark) if apart else None)
    if context.rank in writer_ranks:
        folder.unmark(mark)
    return writer_ranks


def find_source_snapshot(
    context: DistributedContext, folder: SnapshotStorage, writer_ranks: list[int], say: Say
) -> tuple[dict[str, Any] | None, int, bool]:
    """The newest whole snapshot that any keeper has, on the rank that holds it (None on others), and that rank.

    The third is whether this rank has it, too.

    Raises:
        UserError: there are snapshots, and none of them is whole.
    """
    snapshot, trouble = None, ""
    remarks: list[str] = []
    if context.rank in writer_ranks:
        try:
            snapshot = folder.newest(remarks.append)
        except UserError as error:
            trouble = str(error)
    held = context.all_gather_object((-1 if snapshot is None else snapshot["step"], remarks, trouble))
    steps = [step for step, _, _ in held]
    holder = steps.index(max(steps))
    for rank, (_, lines, words) in enumerate(held):
        for line in lines + ([words] if words else []):
            say(f"rank {rank}: {line}" if rank else line)
        if words and max(steps) < 0:
            raise UserError(f"rank {rank}: {words}" if rank else words)
    if len(writer_ranks) > 1:
        say(f"snapshots are kept by ranks {writer_ranks}, which share no folder; the newest is of rank {holder}")
    return (snapshot if context.rank == holder else None), holder, steps[context.rank] == max(steps)
