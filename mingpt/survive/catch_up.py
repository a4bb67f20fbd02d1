"""The newest state of the members of a new view, on all of them."""

from typing import Any, NamedTuple

import torch

from mingpt.parallel.strategy import Strategy
from mingpt.progress import StepResult

NO_STATE = -1  # the step of a process that gets the state from another


class MemberState(NamedTuple):
    """What a member tells the others besides the state of model and optimizer, as plain data."""

    step: int  # NO_STATE: it needs the state of another member
    progress: dict[str, Any]  # of the run, as `Progress.state_dict` returns it
    result: list[Any] | None  # of the newest step, by `result_to_list`; None: no step since the start
    logged: int  # the newest step for which this member knows that everything due is written
    is_writer: bool  # its log is open, since it was rank 0 before


def result_to_list(result: StepResult) -> list[Any]:
    """With the tree reduction, all ranks have the same losses. A float32 is the same number in JSON."""
    losses = torch.stack(result.losses).tolist()
    return [result.batch.start, result.batch.stop, losses, result.grad_norm.item(), result.learning_rate]


def list_to_result(values: list[Any]) -> StepResult:
    start, stop, losses, grad_norm, learning_rate = values
    return StepResult(range(start, stop), list(torch.tensor(losses)), torch.tensor(grad_norm), learning_rate)


def catch_up(strategy: Strategy, mine: MemberState) -> tuple[MemberState, bool]:
    """Copies the newest state of any member to those that have an older one, or none.

    Returns:
        the state that all ranks have now, and whether rank 0 is the writer

    Raises:
        MembershipChanged: the view is over; then this rank has the state that it had before.
    """
    gathered: list[Any] = strategy.context.all_gather_object(mine)
    members = [MemberState(*values) for values in gathered]
    steps = [state.step for state in members]
    source = steps.index(max(steps))
    newest = members[source]
    if min(steps) < newest.step:
        _copy_state(strategy, source, keep=mine.step < newest.step)
    # A process that takes part in a step has logged the one before. Whether a dead rank 0 had logged the newest step
    # too is not known: it is logged again, after its rows are removed from the files.
    if members[0].is_writer:
        logged = members[0].logged
    elif newest.result is None:
        logged = newest.step
    else:
        logged = newest.step - 1
    return newest._replace(logged=logged), members[0].is_writer


def _copy_state(strategy: Strategy, source: int, keep: bool) -> None:
    """Copies the full state of rank `source` to the ranks that pass `keep`, completely or not at all."""
    weights = {}
    state = {}
    if strategy.context.rank == source:
        for name, weight, tensors in strategy.iter_full_state():
            weights[name] = weight
            state[name] = tensors
    received = [item for item in strategy.broadcast_full_state(weights, state, source) if keep]
    for name, key, full in received:
        strategy.load_tensor(name, key, full)
