"""Conflicts between keys, with the number of ranks and with the device: one message lists all of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mingpt.config.conflicts import find_precision_conflicts, find_start_conflicts
from mingpt.config.parser import read_config
from mingpt.config.schema import Config
from mingpt.errors import UserError

TREE = {"distributed.reduction": "tree", "trainer.micro_batch_size": 2, "trainer.threads": 1}
OFFLOAD = {"distributed.strategy": "fsdp", "distributed.cpu_offload": True, "optimizer.name": "adamw"}
STAGES = {"distributed.pipeline_stages": 2, "trainer.micro_batch_size": 2, "trainer.batch_size": 8}


def configured(values: dict[str, Any]) -> Config:
    return read_config([f"--{name}={json.dumps(value)}" for name, value in values.items()])


def only(conflicts: Iterator[str]) -> str:
    [message] = conflicts
    return message


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"model.n_embd": 30}, ["model.n_embd is 30, must be divisible by model.n_head, 4"]),
        (
            {"model.n_embd": 12},
            ["model.n_embd / model.n_head is 12 / 4, must be even with model.architecture nanochat"],
        ),
        (
            {"optimizer.min_learning_rate": 5.0},
            ["optimizer.min_learning_rate is 5.0, must be at least 0 and at most optimizer.learning_rate, 0.005"],
        ),
        ({"trainer.max_steps": None}, ["trainer.max_epochs and trainer.max_steps are both null"]),
        (
            {"distributed.cpu_offload": True},
            [
                "distributed.cpu_offload is true, which needs distributed.strategy fsdp",
                "optimizer.name is muon, must be adamw with distributed.cpu_offload",
            ],
        ),
        (
            OFFLOAD | {"trainer.precision": "fp16"},
            ["trainer.precision is fp16, must be fp32 or bf16 with distributed.cpu"],
        ),
        (OFFLOAD | STAGES, ["distributed.cpu_offload is true, must be false with distributed.pipeline_stages 2"]),
        (TREE | {"trainer.micro_batch_size": None}, ["trainer.micro_batch_size is null, must be a number with "]),
        (TREE | {"trainer.threads": 2}, ["trainer.threads is 2, must be auto or 1 with distributed.reduction tree"]),
        (
            TREE | {"trainer.precision": "fp16"},
            ["trainer.precision is fp16, must be fp32 or bf16 with distributed.red"],
        ),
        (TREE | {"distributed.strategy": "zero1"}, ["distributed.strategy is zero1, must be ddp with distributed.red"]),
        (TREE | STAGES, ["distributed.reduction is tree, must be fast with distributed.pipeline_stages 2"]),
        (STAGES | {"trainer.micro_batch_size": None}, ["trainer.micro_batch_size is null, must be a number with "]),
        (
            STAGES | {"distributed.pipeline_stages": 5},
            ["distributed.pipeline_stages is 5, must be at most model.n_layer, 4"],
        ),
        (
            {"model.n_embd": 30, "optimizer.min_learning_rate": 1.0, "trainer.max_steps": None},
            ["model.n_embd is 30", "optimizer.min_learning_rate is 1.0", "trainer.max_epochs and "],
        ),
    ],
)
def test_conflicts_between_keys_are_in_one_message(values: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(UserError) as error:
        configured(values)
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert [line.startswith(message) for line, message in zip(lines, messages, strict=True)] == [True] * len(lines), (
        lines
    )
    assert all(line.endswith("(in the command line)") for line in lines)


@pytest.mark.parametrize(
    ("values", "world_size", "device", "message"),
    [
        ({"trainer.batch_size": 2}, 3, "cpu", "trainer.batch_size is 2, fewer than the 3 ranks"),
        (STAGES, 1, "cpu", "distributed.pipeline_stages is 2, but 1 is not a multiple of it: start 2 "),
        (STAGES, 3, "cpu", "distributed.pipeline_stages is 2, but 3 is not a multiple of it: start 4 "),
        (STAGES | {"trainer.micro_batch_size": 3}, 2, "cpu", "trainer.batch_size is 8, must be a multiple of 3 "),
        (
            STAGES | {"trainer.micro_batch_size": 8},
            2,
            "cpu",
            "trainer.batch_size / replicas / trainer.micro_batch_size ",
        ),
        (TREE | {"trainer.batch_size": 3}, 3, "cpu", "trainer.batch_size / trainer.micro_batch_size is 3 / 2, fewer "),
        (TREE, 2, "cuda", "trainer.deterministic is false, must be true with distributed.reduction tree on GPUs"),
        (OFFLOAD, 1, "cpu", "distributed.cpu_offload is true, which needs a CUDA GPU; on cpu set it to false"),
        (
            {"trainer.precision": "fp16"},
            1,
            "mps",
            "trainer.precision is fp16, which needs a CUDA GPU; on mps set it to",
        ),
    ],
)
def test_conflicts_with_ranks_and_device(values: dict[str, Any], world_size: int, device: str, message: str) -> None:
    assert only(find_start_conflicts(configured(values), world_size, device)).startswith(message)


def test_values_without_a_conflict_start() -> None:
    gpu = {"trainer.precision": "fp16", "trainer.deterministic": True}
    for values, world_size, device in ((TREE, 6, "cpu"), (OFFLOAD, 2, "cuda"), (STAGES, 4, "cpu"), (gpu, 12, "cuda")):
        assert list(find_start_conflicts(configured(values), world_size, device)) == []


@pytest.mark.parametrize("values", [TREE, OFFLOAD])
def test_fp16_of_a_snapshot_conflicts_like_a_configured_one(values: dict[str, Any]) -> None:
    config = configured(values)
    assert list(find_precision_conflicts(config, "bf16")) == []
    message = only(find_precision_conflicts(config, "fp16"))
    assert message.startswith("trainer.precision is fp16 (kept from the snapshot), must be fp32 or bf16 with ")
