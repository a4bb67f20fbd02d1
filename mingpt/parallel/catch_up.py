"""With distributed.survive: the newest state of the members of a new view, on all of them."""

from typing import Any, NamedTuple

from mingpt.parallel.data_parallel import Strategy


class Progress(NamedTuple):
    """What a rank has besides the state of model and optimizer, as it tells the other members."""

    step: int  # -1: it has no state
    samples: int
    result: Any  # losses, norm and learning rate of the newest step; None: there was no step since the start
    val_loss: float
    best: dict[str, Any]  # step and val_loss of the best snapshot
    settled: int  # the newest step of which it knows that all files are written
    lacks_evaluation: bool  # that of the newest step was broken off
    is_writer: bool  # it was rank 0 in the view before too
    device: str


def catch_up(strategy: Strategy, mine: Progress) -> tuple[Progress, list[Progress]]:
    """Copies the newest state of any member to those that have an older one, or none.

    Returns:
        the progress that all ranks have now, and what each rank had, in rank order

    Raises:
        MembershipChanged: the view is over; then this rank has the state that it had before.
    """
    had = [Progress(*values) for values in strategy.context.all_gather_object(tuple(mine))]
    steps = [progress.step for progress in had]
    source = steps.index(max(steps))
    if min(steps) < max(steps):
        strategy.copy_full_state(source, keep=mine.step < max(steps))
    # Who takes part in a step has settled the one before. Whether a rank 0 that is gone had settled the newest step too
    # is not known: it is settled again, after its rows are removed from the files.
    newest = had[source]
    settled = had[0].settled if had[0].is_writer else newest.step - (newest.result is not None)
    return newest._replace(settled=settled, is_writer=False, device=mine.device), had
