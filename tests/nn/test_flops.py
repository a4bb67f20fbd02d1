"""Metrics of a GPU in train rows."""

import pytest
import torch

from mingpt.nn.flops import flops_per_sequence, gpu_metrics
from tests.helpers import small_gpt

CUDA = torch.device("cuda", 0)


def test_flops_are_those_of_the_usual_formula() -> None:
    """The formula is 6 per token and weight in a matrix product, and 12 n_layer n_embd T per token for attention."""
    model = small_gpt()
    config = model.config
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    per_token = 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size
    assert flops_per_sequence(config) == config.block_size * per_token


def test_mfu_is_given_where_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_gpt().config
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    tokens = 1e12 * 65 * config.block_size / flops_per_sequence(config)  # tokens per second at the peak
    assert gpu_metrics(CUDA, "fp16", config, tokens / 4) == {"memory": 1.5, "mfu": pytest.approx(0.25)}
    assert gpu_metrics(CUDA, "fp32", config, tokens / 65 * 8.1)["mfu"] == pytest.approx(1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert gpu_metrics(CUDA, "fp16", config, tokens) == {"memory": 1.5}
    assert gpu_metrics(torch.device("cpu"), "fp32", config, tokens) == {}
