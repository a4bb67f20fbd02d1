"""The newest state of the members of a new view, on all of them."""

from typing import Any, NamedTuple

from mingpt.parallel.strategy import Strategy

NO_STATE = -1  # the step of a process that gets the state from another


class Progress(NamedTuple):
    """What a process has besides the state of model and optimizer, as it tells the other members."""

    step: int
    samples: int
    result: Any  # losses, norm and learning rate of the newest step; None: there was no step since the start
    val_loss: float
    best: dict[str, Any]  # step and val_loss of the best snapshot
    logged: int  # the newest step of which it knows that all files are written
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
    newest_step = max(steps)
    source = steps.index(newest_step)
    if min(steps) < newest_step:
        _copy_state(strategy, source, keep=mine.step < newest_step)
    newest = had[source]
    # Who takes part in a step has logged the one before. Whether a rank 0 that is gone had logged the newest step too
    # is not known: it is logged again, after its rows are removed from the files.
    if had[0].is_writer:
        logged = had[0].logged
    elif newest.result is None:
        logged = newest.step
    else:
        logged = newest.step - 1
    return newest._replace(logged=logged, is_writer=False, device=mine.device), had


def _copy_state(strategy: Strategy, source: int, keep: bool) -> None:
    """Copies the full state of rank `source` to the ranks that pass `keep`, completely or not at all."""
    weights = {}
    state = {}
    if strategy.context.rank == source:
        for name, weight, tensors in strategy.iter_full_state():
            weights[name] = weight
            state[name] = tensors
    received = []
    for item in strategy.broadcast_full_state(weights, state, source):
        if keep:
            received.append(item)
    for name, key, full in received:
        strategy.load_tensor(name, key, full)
