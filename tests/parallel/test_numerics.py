"""Choices that are saved in the snapshot and kept on resume."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mingpt.config.schema import Config, DistributedConfig, TrainerConfig
from mingpt.parallel import numerics
from mingpt.parallel.numerics import set_numerics
from mingpt.system.device import device_kind

KEPT = "auto: kept from the snapshot"


@pytest.mark.parametrize(
    ("world_size", "reduction", "expected", "reason"),
    [
        (4, "fast", 3, KEPT),
        (2, "fast", 2, "auto: OMP_NUM_THREADS"),  # another number of ranks gives other bits anyway
        (4, "tree", 1, "reduction: tree"),
    ],
)
def test_choices_are_applied_and_threads_kept_at_the_same_number_of_ranks(
    world_size: int, reduction: Any, expected: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    previous = {"precision": "fp32", "threads": 3, "world_size": 4, "hardware": "another CPU"}
    device = torch.device("cpu")
    config = Config(trainer=TrainerConfig(micro_batch_size=1), distributed=DistributedConfig(reduction=reduction))
    context: Any = SimpleNamespace(device=device, world_size=world_size, local_world_size=2)
    monkeypatch.setattr(numerics, "check_equal", lambda context, values, advice: None)
    # Another rank could have more threads: a step takes as long as the slowest rank's.
    monkeypatch.setattr(numerics, "all_gather_object", lambda context, value: [value, (9, "")])
    chosen = set_numerics(config, context, {"choices": previous})
    assert (torch.get_num_threads(), chosen.precision) == (expected, "fp32")
    here = {"threads": expected, "world_size": world_size, "hardware": device_kind(device)}
    assert chosen.choices == previous | here | {"pytorch": torch.__version__}
    assert chosen.reasons == {"precision": f"fp32 ({KEPT})", "threads": f"{expected} per rank ({reason})"}
