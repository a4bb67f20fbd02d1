"""Texts logged at the start of a run."""

import pytest

from mingpt.config import GPTConfig
from mingpt.report import model_summary
from model import GPT


@pytest.mark.parametrize(("architecture", "bias"), [("gpt2", True), ("gpt2", False), ("nanochat", False)])
def test_the_model_summary_adds_up_to_the_models_parameters(architecture: str, bias: bool) -> None:
    model = GPT(
        GPTConfig(architecture=architecture, n_layer=3, n_head=2, n_embd=32, bias=bias, vocab_size=70, block_size=24)
    )
    title, *layers, total = (line.split() for line in model_summary(model).splitlines())
    assert title == ["layer", "parameters", "bytes"]
    counts = {name: (int(count.replace(",", "")), int(size.replace(",", ""))) for name, count, size in layers}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert total == ["total", f"{parameters:,}", f"{4 * parameters:,}"]
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == [parameters, 4 * parameters]
    assert counts["transformer.wte"] == (70 * 32, 4 * 70 * 32)
    assert counts["transformer.h.*.attn.c_attn"][0] == 3 * (3 * 32 * 32 + 3 * 32 * bias)
