"""`python -m benchmarks scale` counts what ranks exchange with their store."""

import pytest
import torch.distributed as dist

from benchmarks.scale import PHASES, count_bytes, measure


def test_eight_ranks_name_the_lost_one_and_their_requests_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # set by `measure`
    rows = {phase: figures for phase, *figures in measure(8)}
    assert tuple(rows) == PHASES
    assert [named for named, *_ in rows.values()] == [0, 0, 7, 0]
    *busy, (_, _, _, *after_the_end) = rows.values()
    for _, seconds, cpu_seconds, requests_of_0, bytes_of_0, requests, size in busy:
        assert 0 <= cpu_seconds < seconds
        assert bytes_of_0 > 30 * requests_of_0 > 0
        assert size > 30 * requests > 0
    assert rows["2 s of heartbeats"][4] > 3 * rows["2 s of heartbeats"][6]  # rank 0 reads those of all
    assert after_the_end[0] + after_the_end[2] <= 2  # that had begun before


def test_bytes_are_those_of_the_connections() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    before = count_bytes(store.port)
    store.set("key", "x" * 10_000)
    assert len(store.get("key")) == 10_000
    assert 20_000 < count_bytes(store.port) - before < 20_100
