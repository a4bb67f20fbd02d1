"""Texts logged at the start of a run."""

from mingpt.config.schema import Config, config_to_dict
from mingpt.run.summary import changed_keys


def test_what_has_changed_is_named_with_both_values_except_for_places() -> None:
    then = config_to_dict(Config())
    now = config_to_dict(Config())
    assert changed_keys(then, now) == []
    now["trainer"] |= {"batch_size": 8, "micro_batch_size": 4, "run_dir": "elsewhere"}
    now["distributed"]["strategy"] = "fsdp"
    del then["optimizer"]["betas"]  # as in a snapshot from before the key
    then["distributed"]["survive"] = True  # as in a snapshot from before the key was removed
    assert changed_keys(then, now) == [
        "trainer.batch_size 12 -> 8",
        "trainer.micro_batch_size null -> 4",
        "distributed.strategy ddp -> fsdp",
    ]
