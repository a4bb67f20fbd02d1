"""Choices that are saved in the snapshot and kept on resume."""

import pytest
import torch

from mingpt.config import TrainerConfig
from mingpt.hardware.device import device_kind
from mingpt.hardware.numerics import choose_numerics

KEPT = "auto: kept from the snapshot, not 2 as OMP_NUM_THREADS says; set trainer.threads to change it"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("world_size", "one_thread_only", "expected", "reason"),
    [
        (4, False, 3, KEPT),
        (2, False, 2, "auto: OMP_NUM_THREADS"),  # another number of ranks gives other bits anyway
        (4, True, 1, "reduction: tree"),
    ],
)
def test_choices_are_applied_and_threads_kept_at_the_same_number_of_ranks(
    world_size: int, one_thread_only: bool, expected: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    previous = {"precision": "fp32", "threads": 3, "world_size": 4, "hardware": "another CPU"}
    device = torch.device("cpu")
    numerics = choose_numerics(TrainerConfig(), device, world_size, 2, one_thread_only, previous)
    assert (torch.get_num_threads(), numerics.threads, numerics.precision) == (expected, expected, "fp32")
    new_facts = {"threads": expected, "world_size": world_size, "hardware": device_kind(device)}
    assert numerics.choices == previous | new_facts
    assert numerics.reasons["threads"] == f"{expected} per rank ({reason})"
    assert numerics.reasons["precision"] == "fp32 (auto: kept from the snapshot)"


@pytest.mark.usefixtures("one_thread")
def test_on_cuda_the_summary_says_what_an_exact_resume_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.hardware.numerics.set_deterministic", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    advice = "equals an uninterrupted run to rounding error; with trainer.deterministic: true, to the last bit"
    for device, deterministic, expected in (
        (torch.device("cuda", 0), False, advice),
        (torch.device("cuda", 0), True, None),
        (torch.device("cpu"), False, None),
    ):
        cfg = TrainerConfig(precision="fp32", threads=1, deterministic=deterministic)
        assert choose_numerics(cfg, device, 1, 1, False, {}).reasons.get("resume") == expected
