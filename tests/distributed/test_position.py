"""Messages about ranks that other ranks wait for."""

import logging
import time
from collections.abc import Iterator

import pytest

from mingpt.distributed.position import Position, SlowRanks, explain_wait, find_late
from mingpt.monitoring.logging import logger

STEP, REDUCE = "trainer.py:127", "mingpt/parallel/strategy.py:198"


def at(line: str, function: str = "", seconds: float = 9.0, **counts: int) -> Position:
    return Position(counts, function, line, seconds)


def explain(*positions: Position) -> str:
    return explain_wait(positions, [f"rank {rank}" for rank in range(len(positions))])


def test_a_rank_that_is_behind_is_named_with_the_collective_and_all_lines() -> None:
    waiting = at(REDUCE, "all_reduce", world=1_234)
    assert explain(waiting, at(STEP, seconds=8.5, world=1_233), waiting) == (
        "rank 1 has not reached collective 1,234; "
        f"ranks 0, 2: in all_reduce at {REDUCE} for 9.0 seconds; rank 1: {STEP} for 8.5 seconds"
    )


def test_a_rank_that_waits_in_a_group_itself_is_not_late() -> None:
    """Rank 0 waits for rank 1 in a group of both, and rank 2 for rank 0 in another."""
    positions = [at(REDUCE, "all_reduce", a=5, b=7), at(STEP, a=4), at(REDUCE, "all_reduce", b=8)]
    assert find_late(positions) == {1: "a"}
    assert find_late([at(STEP, a=5, b=7), *positions[1:]]) == {1: "a"}


def test_with_equal_counts_a_rank_outside_collectives_is_named() -> None:
    """Pipeline stages send and receive point to point, and these operations are not counted."""
    assert explain(at("pipeline.py:124", "_wait_batch_p2p", world=5), at(STEP, world=5)) == (
        f"rank 1 has not answered; rank 0: in _wait_batch_p2p at pipeline.py:124 for 9.0 seconds; "
        f"rank 1: {STEP} for 9.0 seconds"
    )


@pytest.mark.parametrize(
    "positions",
    [
        [at(REDUCE, "all_reduce", world=5), at(STEP, "all_gather_object", world=5)],
        [at(REDUCE, world=5), at(STEP, "all_gather_object", world=5), at(REDUCE, world=5)],  # DDP's, in backward
        [at(REDUCE, world=6), at(STEP, "all_gather_object", world=5)],
    ],
)
def test_nobody_is_named_if_ranks_are_in_different_collectives(positions: list[Position]) -> None:
    assert explain(*positions).startswith("ranks have reached different collectives; rank")


def test_nothing_is_said_of_ranks_at_the_same_place() -> None:
    assert explain(at(REDUCE, "all_reduce", world=5), at(REDUCE, "all_reduce", world=5)) == ""


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger.addFilter(keep)
    yield messages
    logger.removeFilter(keep)


def test_slow_ranks_are_warned_of_once_per_wait(warnings: list[str]) -> None:
    slow, many = SlowRanks(), SlowRanks()

    def look(count: int, seconds: float) -> None:
        waiting, late = at(REDUCE, "all_reduce", world=count), at(STEP, world=count - 1)
        slow.look([waiting, late], seconds)
        if count == 5:
            many.look([waiting, *[late] * 1023], 10 * seconds)

    for count, seconds in [(5, 0.5), (5, 3.0), (6, 3.0), (6, 3.9), (6, 0.2), (6, 9.0), (7, 1.0), (7, 4.0)]:
        look(count, seconds)
    deadline = time.monotonic() + 10
    while len(warnings) < 3 and time.monotonic() < deadline:  # another thread writes them
        time.sleep(0.01)
    messages = [f"rank 1 is {each} seconds behind the others, at {STEP}" for each in ("30.0", "4.0", "4.1")]
    assert [message.split(";")[0] for message in sorted(warnings)] == messages
    assert [message.count(";") for message in sorted(warnings)] == [8, 0, 0]
    assert "; 1015 others" in sorted(warnings)[0]
