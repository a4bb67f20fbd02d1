"""Texts logged at the start of a run."""

from mingpt.config.schema import Config, GPTConfig, config_to_dict
from mingpt.run.summary import changed_keys, model_summary
from model import GPT


def test_the_model_summary_adds_up_to_the_models_parameters() -> None:
    model = GPT(GPTConfig(architecture="gpt2", n_layer=3, n_head=2, n_embd=32, vocab_size=70, block_size=24))
    title, *layers, total = (line.split() for line in model_summary(dict(model.named_parameters())).splitlines())
    assert title == ["layer", "parameters"]
    counts = {name: int(count.replace(",", "")) for name, count in layers}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert total == ["total", f"{parameters:,}"]
    assert sum(counts.values()) == parameters
    assert counts["transformer.wte"] == 70 * 32
    assert counts["transformer.h.*.attn.c_attn"] == 3 * (3 * 32 * 32 + 3 * 32)


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
