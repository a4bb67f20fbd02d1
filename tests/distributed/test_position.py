"""The place of each rank, for messages about ranks that hang."""

import os
import threading
import time
from pathlib import Path

from mingpt.distributed.agreement import all_gather_object
from mingpt.distributed.position import Position, PositionReader, describe_positions
from tests.helpers import open_process_group, run_ranks


def test_ranks_are_grouped_by_place_with_their_longest_time() -> None:
    waiting, late = "all_reduce at trainer.py:189", "count at mingpt/run/evaluation.py:57"
    assert describe_positions([Position(late, 60.5), Position(waiting, 60.25), Position(waiting, 60.0)]) == [
        f"rank 0: in {late} for 60.5 seconds",
        f"ranks 1, 2: in {waiting} for 60.2 seconds",
    ]
    assert describe_positions([Position(late, 3.0)] * 1024) == [
        f"ranks 0, 1, 2, 3, 4, 5, 6, 7, 1016 others: in {late} for 3.0 seconds"
    ]


def test_a_position_is_the_line_that_waits_and_stays_after_an_error(tmp_path: Path) -> None:
    waiting, _ = run_ranks(2, _read_positions, tmp_path=tmp_path)
    assert len({position.place for position in waiting}) == 1
    assert waiting[0].place.startswith("gather at tests/distributed/test_position.py:")
    seconds = [position.seconds for position in waiting]
    assert seconds[0] < 0.01
    assert seconds[1] > 0.3
    assert seconds[2] < 0.01  # in another step
    assert seconds[3] > 1


def _read_positions() -> list[Position]:
    """Rank 1 comes to a collective 1.5 seconds late, and rank 0 then has an error."""
    reader = PositionReader()
    positions: list[Position] = []

    def read() -> None:
        for step, seconds in ((1, 0.6), (1, 0.4), (2, 0.1), (2, 1.5)):
            time.sleep(seconds)
            positions.append(reader.read(step))

    with open_process_group() as context:
        all_gather_object(context, None)
        thread = threading.Thread(target=read)
        thread.start()
        try:
            if context.rank == 1:
                time.sleep(1.5)
            all_gather_object(context, os.getpid())
            raise RuntimeError
        except RuntimeError:
            thread.join()
    return positions
