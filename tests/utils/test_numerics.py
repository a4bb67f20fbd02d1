"""Choices that are saved in the snapshot and kept on resume."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mingpt.config import TrainerConfig
from mingpt.utils.device import device_kind
from mingpt.utils.numerics import choose_numerics

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restored_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("world_size", "one_thread", "expected", "reason"),
    [
        (4, False, 3, "auto: kept from the snapshot"),
        (2, False, 2, "auto: OMP_NUM_THREADS"),  # other numbers of ranks give other bits anyway
        (4, True, 1, "reduction: tree"),
    ],
)
def test_threads_are_applied_and_kept_at_the_same_number_of_ranks(
    world_size: int, one_thread: bool, expected: int, reason: str
) -> None:
    previous = {"precision": "fp32", "threads": 3, "world_size": 4, "hardware": "another"}
    numerics = choose_numerics(TrainerConfig(), CPU, world_size, 2, one_thread, previous)
    assert torch.get_num_threads() == numerics.threads == expected
    assert numerics.choices == {
        "precision": "fp32",
        "threads": expected,
        "world_size": world_size,
        "hardware": device_kind(CPU),
    }
    assert numerics.reasons == {
        "precision": "fp32 (auto: kept from the snapshot)",
        "threads": f"{expected} per rank ({reason})",
    }
