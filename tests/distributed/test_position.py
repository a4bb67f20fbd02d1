"""The place of each rank, for messages about ranks that hang."""

import threading
import time
from pathlib import Path

from mingpt.distributed.agreement import all_gather_object
from mingpt.distributed.position import Position
from tests.helpers import open_process_group, run_ranks


def test_a_position_begins_again_in_each_step_and_stays_after_an_error(tmp_path: Path) -> None:
    stepping, waiting = run_ranks(2, _read_positions, tmp_path=tmp_path)[0]
    assert max(position.seconds for position in stepping) < 1.2
    assert len({position.place for position in waiting}) == 1
    assert waiting[0].place.startswith("gather at tests/distributed/test_position.py:")
    assert waiting[-1].seconds > 1


def _read_positions() -> tuple[list[Position], list[Position]]:
    """Rank 1 comes to a collective a second late, and rank 0 then handles an error."""
    positions: list[Position] = []
    with open_process_group() as context:

        def read() -> None:
            for _ in range(12):
                time.sleep(0.3)
                positions.append(context.health.reader.read(context.health.step))  # type: ignore[union-attr]

        context.health.stop()  # type: ignore[union-attr]
        all_gather_object(context, None)
        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(10):
            context.all_reduce_flags(0).wait()
            time.sleep(0.2)
        try:
            time.sleep(context.rank)
            all_gather_object(context, None)
            raise RuntimeError
        except RuntimeError:
            thread.join()
    return positions[:6], positions[7:]
