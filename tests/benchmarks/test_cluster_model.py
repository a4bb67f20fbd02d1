"""The model of a cluster: operations as PyTorch counts them, communication, and the choice of a strategy."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cluster_model import (
    CLUSTERS,
    MODELS,
    Cluster,
    estimate_step,
    exposed_seconds,
    fastest_per_strategy,
    flops_per_step,
    muon_flops,
    run,
)
from mingpt.config import Config, GPTConfig, OptimizerConfig
from mingpt.config_parser import read_config
from mingpt.optimizer import build_optimizer
from model import GPT

SMALL = GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=11, block_size=16)
INFINIBAND, ETHERNET = CLUSTERS
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def config(**changes: Any) -> Config:
    options = [word for key, value in changes.items() for word in (f"--{key.replace('__', '.')}", str(value))]
    return read_config(["--trainer.batch_size", "2048", "--trainer.save_every", "1000", *options])


@pytest.mark.parametrize(("architecture", "lookup"), [("gpt2", "wpe"), ("nanochat", "wte")])
def test_flops_equal_those_of_a_step_on_the_cpu_and_the_usual_formula(architecture: str, lookup: str) -> None:
    shape = replace(SMALL, architecture=architecture)
    model, idx = GPT(shape), torch.zeros(5, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):  # with bmm_attention
        model(idx, idx)[1].backward()
    weights = sum(
        weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2 and lookup not in name
    )
    formula = 5 * 16 * (6 * weights + 12 * SMALL.n_layer * SMALL.n_embd * 16)
    assert flops_per_step(shape, 5) == counter.get_total_flops() == formula


def test_muons_flops_equal_those_of_its_step() -> None:
    model = GPT(SMALL)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"), torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert muon_flops(SMALL) == counter.get_total_flops() > 0


def test_a_ring_sends_all_but_one_shard_over_its_slowest_link() -> None:
    cluster = Cluster("", intra_node_bandwidth=100.0, inter_node_bandwidth=50.0, gpus_per_node=4, latency=0.0)
    assert [cluster.ring_seconds(1000, ranks) for ranks in (1, 2, 4, 8)] == [0, 5, 7.5, 17.5]
    assert replace(cluster, latency=1.0).ring_seconds(1000, 8) == 17.5 + 3


def test_computation_hides_communication_except_for_the_last_part() -> None:
    cases = [(10, 100), (100, 10), (100, 95), (0, 1)]
    assert [exposed_seconds(*seconds, last=0.1) for seconds in cases] == pytest.approx([1, 90, 10, 0])


@pytest.mark.slow
def test_more_gpus_are_faster_but_less_than_linearly() -> None:
    def fastest(ranks: int, cluster: Cluster) -> float:
        return min(each.seconds for each in fastest_per_strategy(config(), MODELS["1.5B"], ranks, cluster))

    seconds = [fastest(ranks, INFINIBAND) for ranks in (8, 64, 1024)]
    assert seconds[0] / 8 < seconds[1] < seconds[0]
    assert seconds[1] / 16 < seconds[2] < seconds[1]
    assert fastest(1024, ETHERNET) > fastest(64, ETHERNET) * 0.9  # each node still receives the full gradient


@pytest.mark.slow
def test_only_configurations_that_fit_into_memory_are_chosen() -> None:
    found = {each.strategy: each for each in fastest_per_strategy(config(), MODELS["13B"], 8, INFINIBAND)}
    assert found.keys() == {"zero2", "fsdp"}  # 12 bytes per parameter of an unsharded 13B are more than 141 GB
    assert all(each.memory < INFINIBAND.memory for each in found.values())
    assert not list(fastest_per_strategy(config(), MODELS["13B"], 8, replace(INFINIBAND, memory=1e9)))
    small = fastest_per_strategy(config(), MODELS["124M"], 8, INFINIBAND)
    assert [each.strategy for each in small] == list(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slower_network_exposes_more_communication_and_changes_nothing_else(strategy: str) -> None:
    changed = config(distributed__strategy=strategy, trainer__micro_batch_size=2)
    fast, slow = (estimate_step(changed, MODELS["1.5B"], 64, cluster) for cluster in CLUSTERS)
    assert fast.communication < slow.communication
    assert (fast.compute, fast.optimizer, fast.memory) == (slow.compute, slow.optimizer, slow.memory)


def test_ddp_repeats_muon_on_each_rank_and_other_strategies_divide_it() -> None:
    def muon_seconds(strategy: str) -> float:
        adamw, muon = (config(distributed__strategy=strategy, optimizer__name=name) for name in ("adamw", "muon"))
        return estimate_step(muon, MODELS["1.5B"], 16, INFINIBAND).optimizer - (
            estimate_step(adamw, MODELS["1.5B"], 16, INFINIBAND).optimizer
        )

    for strategy in ("zero1", "fsdp"):
        assert muon_seconds(strategy) == pytest.approx(muon_seconds("ddp") / 16, rel=0.1)


def test_a_row_is_printed_for_each_cluster_and_number_of_gpus(capsys) -> None:
    sizes = "--model.architecture gpt2 --model.n_layer 2 --model.n_head 4 --model.n_embd 256 --data.block_size 1024"
    run(["--ranks", "4", "16", *sizes.split()])
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| 15M | ")]
    assert [row.split(" | ")[1] for row in rows] == ["4", "16"] * 2
    assert "100 Gb/s Ethernet" in out
